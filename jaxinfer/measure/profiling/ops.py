"""Classifying operations of compiled programs by kind and by part of the model.

A program's text has the `jax.named_scope`s of each instruction. An instruction that the compiler added gets the scope
of the instructions inside it, of those that use its result, or of the loop that contains it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax

from pallas_kernels.hbm_traffic import HloProgram, Instruction

PRODUCTS, ATTENTION, MOVES = "matrix products", "attention", "gathers, copies, transposes"
COLLECTIVES, SAMPLING, OTHER = "collectives", "sampling", "other"
KINDS = (PRODUCTS, ATTENTION, MOVES, COLLECTIVES, SAMPLING, OTHER)

# Parts of a layer: products and rotations around attention; attention with the cache update; MLP; the rest.
EMBED, PROJECTIONS, ATTEND, MLP = "embed", "q k v o, rope", "attend", "mlp"
NORMS, LOGITS, SAMPLER, REST = "norms, residuals", "logits", "sampler", "engine, loops"
PARTS = (EMBED, PROJECTIONS, ATTEND, MLP, NORMS, LOGITS, SAMPLER, REST)
DRAFT = "draft "  # before the name of a part that is the draft model's

_SCOPES = re.compile(r'op_name="([^"]*)"')
_WORDS = re.compile(r"[\w.\-]+")
_LAYER = re.compile(r"layers\.(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_MORE_CALLED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_COLLECTIVES += ("collective-permute", "collective-broadcast")
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_PRODUCT_CALLS = re.compile(r"gemm|matmul|cublas|ragged-dot|quantized|packed|__onednn|dot", re.IGNORECASE)
_MOVES = {"copy", "copy-start", "copy-done", "transpose", "gather", "scatter", "slice", "dynamic-slice", "pad"}
_MOVES |= {"dynamic-update-slice", "concatenate", "reshape", "broadcast", "bitcast", "reverse", "iota", "select"}
# Opcodes that do not change the kind of a fusion of moves.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "convert"}
MAX_STEPS = 4  # from an instruction without a scope to the nearest one that has a scope
CONTROL = ("while", "conditional", "call", "async-start", "async-done", "async-update")


@dataclass(frozen=True)
class Op:
    """An operation of a compiled program.

    Attributes:
      opcode: of HLO, "" if the program is not known. kind: one of `KINDS`. part: one of `PARTS`, or a draft's.
      layer: its number, None outside of layers and in a draft. scope: the named scopes.
    """

    opcode: str
    kind: str
    part: str
    layer: int | None
    scope: str

    @property
    def is_control(self) -> bool:
        """True if it only runs other operations, which have its time."""
        return self.opcode in CONTROL


def place_of(scope: str) -> tuple[str, int | None]:
    """The part and the layer of an operation with these named scopes."""
    words = _WORDS.findall(scope)
    layer = next((int(match.group(1)) for word in words if (match := _LAYER.fullmatch(word)) is not None), None)
    if "sampler" in words:
        part = SAMPLER
    elif "logits" in words:
        part = LOGITS
    elif layer is not None:
        part = NORMS
        if "attention" in words:
            part = ATTEND if "attend" in words else PROJECTIONS
        elif "mlp" in words:
            part = MLP
    else:
        part = EMBED if "embed" in words else NORMS if "final_norm" in words else REST
    return (DRAFT + part, None) if "draft" in words else (part, layer)


def op_of(opcode: str, scope: str, inner: Iterable[str] = (), called: str = "") -> Op:
    """Classifies an operation, or a fusion of `inner` opcodes; `called` is the target of a custom call."""
    opcodes = set(inner) or {opcode}
    part, layer = place_of(scope)
    own = part.removeprefix(DRAFT)
    work = opcodes - _FREE
    is_product = bool(work.intersection(_PRODUCTS)) or bool(called and _PRODUCT_CALLS.search(called))
    if any(opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES for opcode in opcodes):
        kind = COLLECTIVES
    elif work <= _MOVES and not called:
        kind = MOVES
    elif own == ATTEND:
        kind = ATTENTION
    elif own == SAMPLER:
        kind = SAMPLING
    else:
        kind = PRODUCTS if is_product else OTHER
    return Op(opcode, kind, part, layer, scope)


def ops_of(program: HloProgram) -> dict[str, Op]:
    """The instructions that can run on their own, by name."""
    callers: dict[str, tuple[str, Instruction]] = {}
    for name, computation in program.computations.items():
        for instruction in computation.values():
            called_names = _CALLED.findall(instruction.text)
            for group in _MORE_CALLED.findall(instruction.text):
                called_names += re.findall(r"%([\w.\-]+)", group)
            for called in called_names:
                callers.setdefault(called, (name, instruction))
    scopes: dict[str, str] = {}

    def scope_around(name: str) -> str:
        """The scope of the caller of a computation."""
        if name not in scopes:
            scopes[name] = ""
            if name in callers:
                caller, instruction = callers[name]
                scopes[name] = _scope(instruction) or scope_around(caller)
        return scopes[name]

    fused = {i.called for i in program.instructions if i.opcode == "fusion"}
    ops = {}
    for name, computation in program.computations.items():
        if name in fused:
            continue
        users = _users(computation)
        insides = {key: list(_inside(program, instruction)) for key, instruction in computation.items()}
        own = {key: _scope(instruction) or _scope_inside(insides[key]) for key, instruction in computation.items()}
        for instruction in computation.values():
            inside = insides[instruction.name]
            scope = own[instruction.name] or _scope_beside(instruction, users, computation, own) or scope_around(name)
            target = re.search(r'custom_call_target="([^"]*)"', instruction.text)
            ops[instruction.name] = op_of(
                instruction.opcode,
                scope,
                (inner.opcode for inner in inside),
                f"{target.group(1)} {instruction.name}" if target else "",
            )
    return ops


def _inside(program: HloProgram, instruction: Instruction) -> Iterable[Instruction]:
    """The instructions in a fusion, including nested fusions."""
    if instruction.opcode != "fusion":
        return
    for inner in program.computations.get(instruction.called or "", {}).values():
        yield inner
        yield from _inside(program, inner)


def _scope(instruction: Instruction) -> str:
    match = _SCOPES.search(instruction.text)
    return match.group(1) if match is not None and "/" in match.group(1) else ""


def _scope_inside(instructions: list[Instruction]) -> str:
    """The scope of a product, or the most common one."""
    products = [instruction for instruction in instructions if instruction.opcode in _PRODUCTS and _scope(instruction)]
    scopes = Counter(scope for instruction in products or instructions if (scope := _scope(instruction)))
    return scopes.most_common(1)[0][0] if scopes else ""


def _users(computation: dict[str, Instruction]) -> dict[str, list[str]]:
    """The users of each instruction's result, except the tuple that is returned."""
    users: dict[str, list[str]] = {}
    for instruction in computation.values():
        if instruction.opcode != "tuple" or not instruction.is_root:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
    return users


def _scope_beside(
    instruction: Instruction,
    users: dict[str, list[str]],
    computation: dict[str, Instruction],
    scopes: dict[str, str],
) -> str:
    """The scope of the users of a result. A product that the compiler created without a scope is also classified by its
    operands: between a norm and the cache it is a projection, between attention and the residual the output product."""
    after = _nearest(instruction.name, lambda name: users.get(name, ()), scopes)
    if instruction.opcode not in _PRODUCTS:
        return after
    before = _nearest(
        instruction.name,
        lambda name: [operand for operand in computation[name].operands if operand in computation],
        scopes,
    )
    (source, _), (target, _) = place_of(before), place_of(after)
    if target == ATTEND and source in (NORMS, PROJECTIONS):
        return after.partition("/attend")[0]
    if target == NORMS and source in (ATTEND, MLP):
        return before.partition("/attend")[0]
    return after


def _nearest(name: str, neighbours: Callable[[str], Iterable[str]], scopes: dict[str, str]) -> str:
    """The scope of the nearest instruction that has one."""
    near, seen = [name], {name}
    for _ in range(MAX_STEPS):
        near = [other for neighbour in near for other in neighbours(neighbour) if other not in seen]
        seen.update(near)
        if (scope := next((scopes[neighbour] for neighbour in near if scopes[neighbour]), "")) != "":
            return scope
    return ""


class Programs:
    """The compiled programs of this process, found by the names of their instructions: a trace has only the name of an
    operation's program, which programs for different numbers of slots share."""

    def __init__(self) -> None:
        self._modules: dict[str, list] = {}
        for executable in jax.devices()[0].client.live_executables():
            for module in executable.hlo_modules():
                self._modules.setdefault(module.name, []).append(module)
        self._ops: dict[int, dict[str, Op]] = {}

    def find(self, name: str, instructions: set[str]) -> dict[str, Op]:
        """The operations of the program `name` that has most of these instructions; {} if no program has that name."""
        candidates = [self._read(module) for module in self._modules.get(name, ())]
        return max(candidates, key=lambda ops: len(instructions & ops.keys()), default={})

    def _read(self, module: object) -> dict[str, Op]:
        if id(module) not in self._ops:
            self._ops[id(module)] = ops_of(HloProgram(module.to_string()))  # type: ignore[attr-defined]
        return self._ops[id(module)]
