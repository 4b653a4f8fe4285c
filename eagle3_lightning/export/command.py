"""`eagle3 export`: a checkpoint's draft as a directory that vLLM serves."""

from collections.abc import Sequence
from pathlib import Path

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.checks import COUNT, check_number
from eagle3_lightning.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 export ...`."""
    arguments = _parser().parse_args(argv[1:])
    name, tokens = arguments.target_name, arguments.num_speculative_tokens
    check_number("--num_speculative_tokens", tokens, COUNT)
    for option, value in (("--target_name", name), ("--target", arguments.target)):
        if value == "":
            raise ConfigError(option, value, "it is empty", "Name the target, or leave the option out.")
    from eagle3_lightning.checkpoints import read_checkpoint
    from eagle3_lightning.export.speculators import check_place, export_draft, portable_name
    from eagle3_lightning.options import TargetOptions
    from eagle3_lightning.trained import module_of

    check_place(arguments.out)
    saved = read_checkpoint(arguments.ckpt)
    module = module_of(saved, arguments.ckpt, None if arguments.target is None else TargetOptions(arguments.target))
    export = export_draft(
        module.draft,
        arguments.out,
        target=module.target_info,
        layers=module.layers,
        target_name=portable_name(module.target_info) if name is None else name,
        num_speculative_tokens=module.loss.ttt_steps if tokens is None else tokens,
        vllm_version=arguments.vllm_version,
        origin={
            "checkpoint": str(arguments.ckpt.resolve()),
            "step": saved.get("global_step"),
            "init_from": module.init_from,
        },
    )
    print(
        f"exported to {export.path}: logits within {export.check.relative_error:.2%} of the checkpoint's, "
        f"{export.check.same_best:.1%} of the best tokens equal"
    )
    print(f"serve it with\n  {export.serve_command}")
    return 0


def _parser() -> StrictParser:
    parser = StrictParser(
        prog="eagle3 export",
        usage="eagle3 export --ckpt FILE --out DIR [options]",
        description="Writes the draft, loads it back and compares its logits; replaces an earlier export in DIR.",
    )
    parser.add_argument("--ckpt", type=Path, required=True, metavar="FILE", help="a checkpoint of `eagle3 fit`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty, or an earlier export")
    parser.add_argument(
        "--target", type=str | None, default=None, metavar="PATH", help="where the target is now, if it was moved"
    )
    parser.add_argument(
        "--target_name",
        type=str | None,
        default=None,
        metavar="NAME",
        help="hub id or path under which `vllm serve DIR` shall load the target; default: as it was trained with",
    )
    parser.add_argument(
        "--num_speculative_tokens",
        type=int | None,
        default=None,
        metavar="K",
        help="tokens that `vllm serve DIR` proposes in a round; default: the steps that it was trained with",
    )
    parser.add_argument(
        "--vllm_version",
        type=str | None,
        default=None,
        metavar="VERSION",
        help="refuse what this vLLM cannot serve; default: no check",
    )
    return parser
