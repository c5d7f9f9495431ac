"""Texts with control tokens of published tokenizers."""

CONTROL = (
    *("a<|im_end|>b", "<think>x</think>", "<|eot_id|><eos>", "<start_of_turn>user\nHi<end_of_turn>"),
    *("<tool_call>{}", "<|start|>assistant<|channel|>final<|message|>Hi<|return|>", "<｜User｜>Hi<｜Assistant｜>"),
)
