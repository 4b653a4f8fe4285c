"""Sizes and flags of a draft, resolved against its target."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import NUM_AUX_LAYERS
from eagle3_lightning.options import DraftOptions

if TYPE_CHECKING:
    from eagle3_lightning.target import TargetInfo


@dataclass(frozen=True)
class DraftConfig:
    """Every number that fixes a draft's tensors and arithmetic; plain values only, so that a checkpoint can hold it.

    Attributes:
        arch: `llama`, or `qwen3` for per-head norms on queries and keys.
        hidden_size: H, the target's own.
        intermediate_size: width of the MLP.
        num_layers: decoder layers of the draft.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: size of a head, even.
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: D, the tokens that the draft can propose; V is the whole vocabulary.
        num_aux: A, auxiliary layers fused into the draft's input.
        rms_norm_eps: of every norm.
        rope: rotary parameters in the `rope_parameters` form, the target's own.
        max_position_embeddings: the target's own.
        norm_before_residual: the residual of the first layer starts from the normed features.
        norm_before_fc: RMSNorm over the concatenated auxiliary states before `fc`.
        fc_norm: RMSNorm on each auxiliary state before `fc`.
        norm_output: the state fed back at the next step is normed.
        train_head: the lm_head is trained.
        feature_scale: auxiliary states are divided by their RMS, channel by channel.
        sliding_window: step-0 keys that a query sees, itself included; None is all of its document.
    """

    arch: Literal["llama", "qwen3"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False
    feature_scale: bool = True
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built; the message names the option that a user would change.

        Raises:
            ConfigError: a draft vocabulary above the target's, heads that do not divide, or an odd head size.
        """
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                "model.draft.draft_vocab_size",
                self.draft_vocab_size,
                f"the target's vocabulary has only {self.vocab_size} tokens",
                f"Give at most {self.vocab_size}, or null for the whole vocabulary.",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.draft.num_kv_heads",
                self.num_kv_heads,
                f"it does not divide the {self.num_heads} query heads",
                f"Choose a divisor of {self.num_heads}.",
            )
        if self.head_dim % 2:
            raise ConfigError(
                "model.draft.head_dim",
                self.head_dim,
                "rotary embeddings turn pairs of channels",
                "Choose an even head size.",
            )

    @classmethod
    def resolve(cls, options: DraftOptions, target: "TargetInfo") -> "DraftConfig":
        """Fill what the options leave open with the target's own sizes.

        Args:
            options: what the user asked for.
            target: the target's sizes.

        Raises:
            ConfigError: sizes that do not fit each other or the target.
        """
        num_heads = options.num_heads or target.num_heads
        num_kv_heads = options.num_kv_heads or (target.num_kv_heads if options.num_heads is None else num_heads)
        return cls(
            arch=options.arch,
            hidden_size=target.hidden_size,
            intermediate_size=options.intermediate_size or target.intermediate_size,
            num_layers=options.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=options.head_dim or target.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=options.draft_vocab_size or target.vocab_size,
            num_aux=NUM_AUX_LAYERS,
            rms_norm_eps=target.rms_norm_eps,
            rope=dict(target.rope),
            max_position_embeddings=target.max_position_embeddings,
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.norm_before_fc,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            train_head=options.train_head,
            feature_scale=options.feature_scale,
            sliding_window=options.sliding_window,
        )

    @property
    def full_vocab(self) -> bool:
        """Whether the draft proposes from the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output widths of the query, key and value projections."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DraftConfig":
        """The inverse of `as_dict`."""
        return cls(**values)
