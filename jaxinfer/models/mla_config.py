"""What multi-head latent attention is, apart from its weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one short vector
    per token, which is all that is cached, beside one rotated key that the heads share.

    Attributes:
      latent_size: width of that vector (kv_lora_rank).
      rope_size: width of the rotated part of queries and keys (qk_rope_head_dim).
      nope_size: width of the part that knows no position (qk_nope_head_dim).
      value_size: width of a head's values (v_head_dim).
      query_rank: width of the vector that queries come from (q_lora_rank); None where they come from the hidden state.
      is_interleaved: rotated pairs lie side by side in the weights, 2i with 2i + 1, not i with i + rope_size / 2.
      norm_eps: of the norms of both short vectors.
    """

    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None = None
    is_interleaved: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = ("latent_size", "rope_size", "nope_size", "value_size")
        for name in (*sizes, *(() if self.query_rank is None else ("query_rank",))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.rope_size % 2:
            raise ValueError(f"rope_size={self.rope_size} is odd")

    @property
    def query_size(self) -> int:
        """Width of a head's query before its first part is taken to the latent space."""
        return self.nope_size + self.rope_size

    @property
    def key_size(self) -> int:
        """Width of what is cached of a token: the latent vector, then the rotated key."""
        return self.latent_size + self.rope_size
