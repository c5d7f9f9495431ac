"""`jaxinfer demo`: the embedded model writes Python, and how fast it does."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK, say
from jaxinfer.cli.options import as_json, merge_params
from jaxinfer.cli.output import console, decode_rate, describe, end_line, stream_answer, write_report, write_text
from jaxinfer.options import option
from jaxinfer.progress import Stage
from jaxinfer.tables import facts_text

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.sampling import SamplingParams

# Each ends at a token boundary: a space or an indentation belongs to the next token.
PROMPTS = (
    "def read_lines(path):\n    with",
    "async def connect(host, port):",
    "class ParseError(Exception):",
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    prompt: list[str] | None = option(None, "Continue this text instead; may be repeated.", "TEXT", "--prompt -p")
    max_tokens: int = option(64, "Tokens to generate for each prompt.", "N")
    temperature: float | None = option(
        None, "0 takes the most probable token. Default: the checkpoint's generation_config.", "X"
    )
    seed: int = option(0, "The same seed gives the same text.", "N")
    model: str = option("demo", "demo, demo-draft, or any other model.", flag="--model -m")
    as_json: bool = as_json("One JSON object.")


def demo(options: DemoOptions) -> int:
    """Generate text with the model inside this package.

    The model completes Python code; nothing is downloaded and no accelerator is needed. All programs are compiled
    before the time is measured.
    """
    from jaxinfer.sampling.params import SamplingParams

    model, as_json = options.model, options.as_json
    values = {name: getattr(options, name) for name in ("max_tokens", "seed", "temperature")}
    values = {name: value for name, value in values.items() if value is not None}
    SamplingParams.from_dict(values)  # raises before the model is loaded
    prompts = tuple(options.prompt or PROMPTS)
    started = time.monotonic()
    with Stage(f"loading {model}"):
        from jaxinfer.api.llm import LLM

        llm = LLM(model, max_seqs=1)
    load_seconds = time.monotonic() - started
    with llm:
        params = merge_params(llm.default_params, values)
        started = time.monotonic()
        with Stage("compiling"):  # exactly the programs that the prompts need
            short = replace(params, max_tokens=min(2, params.max_tokens or 2))
            for prompt in prompts:
                for _ in llm.stream(prompt, short):
                    pass
        compile_seconds = time.monotonic() - started
        device = llm.explain().to_dict()["device"]
        if not as_json:
            times = f"loaded in {load_seconds:.1f} s, compiled in {compile_seconds:.1f} s"
            write_text(f"{model} on {device['kind']}: {times}\n")
        outputs = [_show(llm, text, params, is_quiet=as_json) for text in prompts]
    report = {
        "model": model,
        "device": device,
        "load_seconds": load_seconds,
        "compile_seconds": compile_seconds,
        "prompts": [_measures(output) for output in outputs],
        "total": _totals(outputs),
    }
    write_report(report, _totals_text, as_json=as_json)
    failed = next((answer for output in outputs for answer in output.outputs if answer.finish_reason == "error"), None)
    if failed is not None:
        say(f"error: {failed.error}")
    return OK if failed is None else ERROR


def _show(llm: "LLM", prompt: str, params: "SamplingParams", *, is_quiet: bool) -> "RequestOutput":
    if is_quiet:
        return llm.generate(prompt, params, use_tqdm=False)[0]
    write_text("\n")
    console().print(prompt, style="bold", end="", markup=False, soft_wrap=True)
    text, output = stream_answer(llm, prompt, params, write_text, shows_waiting=False)
    assert output is not None
    end_line(text)
    console().print(describe(llm, output), style="dim", markup=False)
    return output


def _measures(output: "RequestOutput") -> dict[str, Any]:
    answer, timings = output.outputs[0], output.timings
    assert timings is not None
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "time_to_first_token_seconds": timings.time_to_first_token,
        "total_seconds": timings.total_time,
        "decode_tokens_per_second": decode_rate(output),
    }


def _totals(outputs: list["RequestOutput"]) -> dict[str, Any]:
    """Sums over all prompts, which run one after the other. First tokens count as prefill, not as decoding."""
    timings = [output.timings for output in outputs if output.timings is not None]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = sum(timing.time_to_first_token for timing in timings)
    total = sum(timing.total_time for timing in timings)
    num_decoded = num_tokens - len(outputs)
    return {
        "num_tokens": num_tokens,
        "total_seconds": total,
        "mean_time_to_first_token_seconds": first / len(outputs),
        "decode_tokens_per_second": num_decoded / (total - first) if num_decoded > 0 and total > first else None,
    }


def _totals_text(report: dict[str, Any]) -> str:
    total = report["total"]
    rate = total["decode_tokens_per_second"]
    lines = {
        "decode": "too short to measure" if rate is None else f"{rate:,.0f} tokens/s",
        "first token": f"{1000 * total['mean_time_to_first_token_seconds']:,.0f} ms on average",
        "in total": f"{total['num_tokens']} tokens in {total['total_seconds']:.2f} s",
    }
    return "\n" + facts_text(lines)
