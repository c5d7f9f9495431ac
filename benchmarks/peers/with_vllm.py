"""vLLM as a peer, on machines with a CUDA GPU."""

from pathlib import Path

from benchmarks.peers.workload import MAX_MODEL_LEN, MAX_SEQS


class Vllm:
    compiles_shapes = False  # it captures its graphs when it starts

    def __init__(self, folder: Path):
        from vllm import LLM

        self._llm = LLM(
            model=str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQS,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
        ]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]
