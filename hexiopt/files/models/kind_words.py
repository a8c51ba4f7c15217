"""Kinds of layers in words."""

from collections import Counter
from collections.abc import Sequence

from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent


def layers_in_words(layers: Sequence[LayerKind], extra: Sequence[LayerKind] = ()) -> str:
    """The layers of a model by their parts, in one line; empty for none. `extra` predict further tokens."""
    if not layers:
        return ""
    channels = Counter(text for kind in layers if (text := " beside ".join(map(_in_words, kind.channels))))
    mixers = Counter(text for kind in layers if (text := " beside ".join(map(_in_words, kind.mixers))))
    words = [_enumeration(counts) for counts in (channels, mixers) if counts]
    further = f"; {len(extra)} more for further tokens" if extra else ""
    return f"{len(layers)} layers: {'; '.join(words)}{further}"


def _enumeration(counts: Counter[str]) -> str:
    """Each text with its number; a number in front of a text is divided from it."""
    return ", ".join(f"{count}{' of' * text[0].isdigit()} {text}" for text, count in counts.items())


def _in_words(part: Attention | Recurrent | Dense | Experts) -> str:
    match part:
        case Attention():
            name = "latent attention" if part.kv_rank else "attention"
            groups = f" ({part.kv_heads} for keys)" if part.kv_heads != part.heads else ""
            window = "" if part.window is None else f" in {'chunks' if part.chunked else 'a window'} of {part.window:,}"
            return f"{name} of {part.heads} heads{groups}{window}"
        case Recurrent():
            return f"{'gated delta rule' if part.delta else 'Mamba-2'} of {part.heads} heads"
        case Dense():
            return "dense"
        case Experts():
            number, rest = divmod(part.shared, part.ffn_size)
            shared = f" + {number} shared" if number and not rest else " + shared" if part.shared else ""
            return f"{part.count} experts, {part.top_k} a token{shared}"
