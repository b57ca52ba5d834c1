"""Compile every kernel for an H100/H200 (sm_90), which needs no GPU; prints one JSON line of what each takes.

Run by test_compile.py in a process of its own, since kernels are either interpreted or compiled, whichever is first.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from semspec.model.kernels import (
    attention,
    attention_splits,
    codes,
    elementwise,
    gemm,
    moe,
    one_token,
    quantised,
    quantised_moe,
    sparse_mlp,
    tiles,
)
from semspec.model.kernels import select_blocks as blocks
from semspec.sampling.kernels import filter, race, top

HALF, WIDE, WHOLE, SHORT = "*bf16", "*fp32", "*i64", "*i32"
CACHE = {"table_width": "i32", "page_stride": "i64", "head_stride": "i32", "position_stride": "i32"}
PLACES = {"slots": WHOLE, "starts": WHOLE, "counts": WHOLE}


def built(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 3
) -> dict[str, Any]:
    """Pointers and strides are taken to be aligned, as torch's are."""
    names = kernel.arg_names
    constants = {name: value for name, value in (("PDL", True), ("AHEAD", 4)) if name in names} | constants
    assert set(names) == set(types) | set(constants), set(names) ^ (set(types) | set(constants))
    aligned = [n for n in types if types[n].startswith("*") or n.endswith("stride")]
    source = ASTSource(
        kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    text = made.asm["ptx"]
    stored = text.find("st.global")
    return {
        "waits_for_stores": 0 < stored < text.find("bar.sync", stored) < text.find("cp.async.cg"),
        "loads_after_reductions": 0 < text.find("bar.sync") < text.rfind("ld.global"),
        "shared": made.metadata.shared,
        "cubin": len(made.asm["cubin"]),
        "wide_copies": text.count("cp.async.cg"),  # 16 bytes each, as only loads of a pipeline are made
        "narrow_copies": text.count("cp.async.ca"),  # of 4 or 8 bytes
        "slow_conversions": text.count("cvt.bf16.f16") + text.count("cvt.rn.bf16.f16"),
    }


def main() -> None:
    attend = {
        "q": HALF, "keys": HALF, "values": HALF, "key_scales": WHOLE, "value_scales": WHOLE, "tables": SHORT, **PLACES,
        "offsets": WHOLE, "bases": WHOLE, "lineages": WHOLE, "depths": WHOLE, "lists": WHOLE, "listed": WHOLE,
        "out": HALF, "parts": WIDE, "sums": WIDE, "cos": WIDE, "sin": WIDE,
        "query_norm": HALF, "key_norm": HALF, "marks": "*i8", "mean_keys": HALF, "mean_values": HALF, "eps": "fp32",
        "queries": "i32", "width": "i32", **CACHE, "mean_slot_stride": "i64", "mean_head_stride": "i32",
        "scale": "fp32", "window": "i32",
    }  # fmt: skip
    narrow = {"keys": "*fp8e4nv", "values": "*fp8e4nv", "key_scales": WIDE, "value_scales": WIDE}
    still: dict[str, Any] = {"ROPE": False, "NORMED": False, "HALF": 0, "PAGE": 64, "SPAN": 0, "REST": False}
    still |= {"FP8": False, "PACKED": False}
    card, results = tiles.Card(132, 227 * 1024), {}
    for queries, size in ((1, 128), (9, 128), (17, 128), (64, 256)):
        t = tiles.Tiles.of(queries, 5, 8, 1, size, 2, card)
        constants = {"WINDOWED": False, "TREE": False, "GROUP": 5, "D": size, "BLOCK_D": size, "SPLITS": t.splits}
        constants |= {"BLOCK_M": t.rows, "BLOCK_N": t.keys} | still
        results[f"attend {queries}"] = built(attention._attend, attend, constants, t.warps, t.stages)
        one = attend | {"tables": WHOLE}  # a page for each slot
        results[f"attend {queries}, one page"] = built(
            attention._attend, one, constants | {"PAGE": 0}, t.warps, t.stages
        )
        n = tiles.Tiles.of(queries, 5, 8, 1, size, 2, card, narrow=True)
        own = constants | {"FP8": True, "BLOCK_M": n.rows, "BLOCK_N": n.keys, "SPLITS": n.splits}
        results[f"attend {queries}, fp8"] = built(attention._attend, attend | narrow, own, n.warps, n.stages)
        results[f"attend {queries}, packed"] = built(
            attention._attend, attend, constants | {"PACKED": True}, t.warps, t.stages
        )
        few = attend | {"lists": "*i32", "listed": "*i32"}
        for span in (16, 64) if queries in (9, 17) else ():
            made = built(attention._attend, few, constants | {"SPAN": span}, t.warps, t.stages)
            results[f"attend {queries}, blocks of {span}"] = made
            made = built(attention._attend, few, constants | {"SPAN": span, "REST": True}, t.warps, t.stages)
            results[f"attend {queries}, blocks of {span} and means"] = made
    t = tiles.Tiles.of(16, 4, 8, 1, 128, 2, card, reach=tiles.LONG)
    long = constants | {"GROUP": 4, "D": 128, "BLOCK_D": 128, "SPLITS": t.splits, "BLOCK_M": t.rows, "BLOCK_N": t.keys}
    results["attend 16, long"] = built(attention._attend, attend, long, t.warps, t.stages)
    tree = constants | {"TREE": True, "WINDOWED": True, "D": 96, "BLOCK_D": 128, "BLOCK_M": 64}
    results["attend, tree"] = built(attention._attend, attend, tree)
    results["attend, tree, packed"] = built(attention._attend, attend, tree | {"PACKED": True})
    t = tiles.Tiles.of(1, 6, 2, 1, 128, 2, card)
    rope = {"WINDOWED": False, "TREE": False, "GROUP": 6, "D": 128, "BLOCK_D": 128, "SPLITS": t.splits}
    rope |= still | {"BLOCK_M": t.rows, "BLOCK_N": t.keys, "ROPE": True, "NORMED": True, "HALF": 64}
    results["rope_cache_attend"] = built(attention._attend, attend, rope, t.warps, t.stages)
    results["rope_cache_attend, fp8"] = built(
        attention._attend, attend | narrow, rope | {"FP8": True}, t.warps, t.stages
    )
    results["join"] = built(
        attention_splits._join,
        {"parts": WIDE, "sums": WIDE, "out": HALF},
        {"D": 128, "BLOCK_D": 128, "SPLITS": 32},
    )
    results["add_norm"] = built(
        elementwise._add_norm,
        {"x": HALF, "added": WIDE, "weight": HALF, "inner": HALF, "normed": HALF, "eps": "fp32", "part": "i32"},
        {"SIZE": 5120, "BLOCK": 8192, "INNER": True, "PARTS": 4},
        warps=16,
    )
    rope = {
        "qkv": HALF, "out": HALF, "keys": HALF, "values": HALF, "key_scales": WHOLE, "value_scales": WHOLE,
        "tables": SHORT, **PLACES,
        "bases": WHOLE, "depths": WHOLE,
        "cos": WIDE, "sin": WIDE, "query_norm": HALF, "key_norm": HALF, "eps": "fp32", "queries": "i32", **CACHE,
    }  # fmt: skip
    constants = {"HEADS": 40, "KV_HEADS": 8, "D": 128, "HALF": 48, "REST": 32, "BLOCK_HALF": 64, "BLOCK_REST": 32}
    constants |= {"PAGE": 64, "NORMED": True, "TREE": True, "FP8": False}
    results["rope_and_cache"] = built(elementwise._rope_and_cache, rope, constants, warps=1)
    narrow_rope = rope | narrow, constants | {"FP8": True}
    results["rope_and_cache, fp8"] = built(elementwise._rope_and_cache, *narrow_rope, warps=1)
    results["gated"] = built(
        elementwise._act_and_mul, {"gate_up": HALF, "out": HALF, "size": "i32"}, {"BLOCK": 1024, "SILU": True}
    )
    results["note"] = built(
        elementwise._advance,
        {"state": WHOLE, "tokens": WHOLE, "stops": "*i1", "out": WHOLE, "batch": "i32", "stride": "i32"},
        {"BLOCK": 8},
        warps=1,
    )
    operands = {"x": HALF, "weight": HALF, "bias": HALF, "out": HALF, "rows": "i32", "outputs": "i32"}
    for name, size, parts, gated in (
        ("product", (2048, 1536), False, False),
        ("product, parts", (1536, 8960), True, False),
        ("product, gated", (17920, 1536), False, True),
    ):
        cut = gemm.SkinnyGemmConfig.of(size, card, parts, gated)
        constants = {"INPUTS": size[1], "BLOCK_M": 16, "BLOCK_N": cut.columns, "BLOCK_K": cut.depth}
        constants |= {"SPLITS": cut.splits, "BIASED": True, "GATED": gated, "SILU": True}
        types = operands | ({"out": WIDE} if parts else {})
        results[name] = built(gemm._product, types, constants, cut.warps, cut.stages)
    whole = {
        "x": HALF, "table": WHOLE, "met": SHORT, "qkv": HALF, "parts": WIDE, "sums": WIDE, "attended": HALF,
        "inner": HALF, **PLACES, "tables": SHORT, "cos": WIDE, "sin": WIDE, "eps": "fp32", "scale": "fp32",
        "layers": "i32", **CACHE,
    }  # fmt: skip
    for kind, told in ((one_token.PLAIN, "bf16"), (one_token.IN_WORDS, "fp8")):
        sizes = one_token.Sizes(1536, 12, 2, 128, 8960, told == "fp8", True, False, True)
        cut = one_token.OneTokenConfig.of(sizes, card)
        constants = {
            "WIDTH": 1536, "HEADS": 12, "KV_HEADS": 2, "D": 128, "FFN": 8960, "HALF": 64, "PAGE": 64, "BIASED": True,
            "NORMED": False, "SILU": True, "KIND": kind, "PROGRAMS": cut.programs, "SPLITS": cut.splits,
            "TILE": cut.outputs, "DEPTH": cut.depth * (2 if told == "fp8" else 1), "KEYS_AT_ONCE": 64, "ROWS": 16,
            "STAGES": cut.stages, "LINES": cut.lines,
        }  # fmt: skip
        results[f"one token, {told}"] = built(one_token._run_layers, whole, constants, cut.warps, 2)
    print(json.dumps(results | grouped() | choosing() | drawing() | quantising(card) | quantised_experts()))


def quantising(card: tiles.Card) -> dict[str, Any]:
    """The matrices of a 32B model, and one with small groups."""
    results = {}
    operands = {"x": HALF, "codes": "*u8", "scales": WIDE, "zeros": WIDE, "gain": WIDE, "bias": HALF, "out": HALF}
    operands |= {"rows": "i32", "outputs": "i32", "out_stride": "i32", "scale_row": "i32", "scale_group": "i32"}
    layouts = (
        ("fp8", 0, 1, 0), ("fp8", 128, 128, 0), ("int4", 128, 1, 1), ("int4", 32, 1, 1), ("int4", 128, 1, 2),
        ("fp4", 16, 1, 0),
    )  # fmt: skip
    cases = ((9, (55296, 5120), False), (72, (5120, 27648), True))
    for (kind, group, out, zeros), (rows, size, parts) in product(layouts, cases):
        halves, depth = 2 if kind in ("int4", "fp4") else 1, max(32, min(128, group or 128))
        weights = (size[0], size[1] // halves)
        cut = quantised.QuantisedConfig.of(weights, rows, card, parts, not parts, depth, halves)
        constants = {
            "INPUTS": size[1], "BLOCK_M": cut.rows, "BLOCK_N": cut.columns, "BLOCK_K": cut.depth,
            "KIND": codes.KINDS[kind], "GROUP": group, "GROUP_OUT": out, "ZEROS": zeros, "GAIN": True,
            "SPLITS": cut.splits, "BIASED": True, "GATED": not parts, "SILU": True, "SWAP": cut.rows > 64, "ASM": True,
            "UNROLL": cut.unroll, "STAGES": cut.stages,
        }  # fmt: skip
        types = operands | ({"out": WIDE} if cut.splits > 1 else {})
        if zeros == 1:
            types |= {"zeros": SHORT, "scales": HALF}
        name = f"{kind}, groups of {group}, zeros {zeros}, {rows} rows"
        results[name] = built(quantised._quantised_product, types, constants, cut.warps, cut.stages)
    return results


def quantised_experts() -> dict[str, Any]:
    """Of a layer of 128 experts, 2048 wide, with 768 channels each."""
    results = {}
    types = {"x": HALF, "codes": "*u8", "scales": WIDE, "zeros": WIDE, "gain": WIDE, "weights": WIDE, "lists": SHORT}
    types |= {"listed": SHORT, "out": HALF, "picks": "i32", "rows": "i32", "experts": "i32"}
    types |= dict.fromkeys(("scale_expert", "scale_row", "scale_group"), "i32")
    for (kind, group, zeros), rows, gated in product(
        (("fp8", 0, 0), ("int4", 128, 2), ("fp4", 16, 0)), (16, 64), (True, False)
    ):
        inputs, depth = 2048 if gated else 768, 32 if kind == "fp4" else 128
        constants: dict[str, Any] = {"INPUTS": inputs, "OUTPUTS": 768 if gated else 2048, "CHOSEN": 8, "BLOCK_M": rows}
        constants |= {"BLOCK_N": quantised_moe.COLUMNS, "BLOCK_K": depth, "KIND": codes.KINDS[kind], "GROUP": group}
        constants |= {"GROUP_OUT": 1, "ZEROS": zeros, "GAIN": kind == "fp4", "GATED": gated, "SILU": True, "ASM": True}
        own = types | ({} if gated else {"out": WIDE}) | ({"scales": HALF, "zeros": HALF} if kind == "int4" else {})
        name = f"experts in {kind}, {'gate and up' if gated else 'down'}, {rows} rows"
        results[name] = built(quantised_moe._experts, own, constants | {"STAGES": 4}, 4, 4)
    return results


def grouped() -> dict[str, Any]:
    """Mixtures of Qwen3-30B-A3B's shape, and channels of a 32B model."""
    results = {}
    lists = {"lists": SHORT, "listed": SHORT}
    sizes: dict[str, Any] = {"WIDTH": 2048, "HIDDEN": 768, "CHOSEN": 8}
    for most in (0, 3):
        results[f"route, {most} skipped"] = built(
            moe._route,
            {
                "logits": WIDE, "betas": WIDE, "counts": WHOLE, "marks": WHOLE, "weights": WIDE, "index": SHORT,
                "parts": WIDE, "queries": "i32", "rows": "i32",
            },
            {
                "EXPERTS": 128, "BLOCK_E": 128, "CHOSEN": 8, "BLOCK_C": 8, "MOST": most, "RENORMALISE": True,
                "PARTS": 1 + most, "WIDTH": 2048, "BLOCK_W": 2048,
            },
        )  # fmt: skip
    listing = {"index": SHORT, **lists, "picks": "i32"}
    results["list"] = built(moe._list, listing, {"BLOCK_E": 128, "BLOCK": 128}, warps=1)
    marking = {"gate": HALF, "active": HALF, "made": HALF, "flags": SHORT, "totals": SHORT, "counts": WHOLE}
    marking |= {"marks": WHOLE, "batch": "i32", "queries": "i32", "threshold": "fp32"}
    constants: dict[str, Any] = {"CHANNELS": 27648, "BLOCK": sparse_mlp.BLOCK, "BLOCK_Q": 16, "SILU": True}
    results["mark"] = built(sparse_mlp._mark, marking, constants)
    listing = {"flags": SHORT, "totals": SHORT, "listed": SHORT, "number": SHORT}
    constants = {"CHANNELS": 27648, "BLOCK": sparse_mlp.BLOCK, "BLOCKS": 216, "BLOCK_T": 256}
    results["list of channels"] = built(sparse_mlp._list, listing, constants, warps=1)
    wide: dict[str, Any] = {"WIDTH": 5120, "CHANNELS": 27648, "BIASED": False}
    some = {"weight": HALF, "bias": HALF, "listed": SHORT, "number": SHORT, "rows": "i32"}
    for rows in (16, 64):
        for name, kernel, types, constants, cut in (
            ("gate_up", moe._gate_up, {"x": HALF, "weight": HALF, **lists, "out": HALF, "picks": "i32",
             "experts": "i32"}, sizes | {"SILU": True}, moe.CUTS[0]),
            ("down", moe._down, {"made": HALF, "weight": HALF, "weights": WIDE, **lists, "parts": WIDE,
             "picks": "i32", "rows": "i32", "experts": "i32"}, sizes, moe.CUTS[1]),
            ("up of channels", sparse_mlp._up, {"x": HALF, **some, "active": HALF, "out": HALF}, wide,
             sparse_mlp.CUTS[0]),
            ("down of channels", sparse_mlp._down, {"made": HALF, **some, "parts": WIDE}, wide | {"SPLITS": 6},
             sparse_mlp.CUTS[1]),
        ):  # fmt: skip
            constants = constants | {"BLOCK_M": rows, "BLOCK_N": cut.columns, "BLOCK_K": cut.depth}
            results[f"{name}, {rows} rows"] = built(kernel, types, constants, cut.warps, cut.stages)
    return results


def choosing() -> dict[str, Any]:
    """Blocks of 64 of a context of 131,072, in a model of 8B's shape."""
    results = {}
    asking = {"q": HALF, "means": HALF, "variances": HALF, **PLACES, "sums": WIDE, "queries": "i32", "scale": "fp32"}
    asking |= {"slot_stride": "i64", "head_stride": "i32"}
    sizes: dict[str, Any] = {"BLOCK": 64, "GROUP": 4, "D": 128, "BLOCK_D": 128, "BLOCK_M": 64, "BLOCK_N": blocks.SPAN}
    for reaching in (False, True):
        made = built(blocks._weigh, asking, sizes | {"REACHING": reaching})
        results["weigh blocks" + ", reach" * reaching] = made
    for name in ("first", "share", "reach"):
        results[f"score blocks, {name}"] = built(
            blocks._score, asking | {"scores": SHORT, "most": "i32"},
            sizes | {"REACHING": name == "reach", "SHARE": name != "first", "SINKS": 1, "RECENT": 2, "BLOCK_G": 4},
        )  # fmt: skip
    selecting = {"scores": SHORT, "starts": WHOLE, "pairs": WHOLE, "lists": SHORT, "listed": SHORT, "marks": "*i8"}
    selecting |= {"most": "i32"}
    for equal, held in ((True, 2048), (False, blocks.HELD)):
        results[f"select blocks, {held} held"] = built(
            blocks._select, selecting,
            {"BLOCK": 64, "EQUAL": equal, "MARKING": equal, "HELD": held, "BLOCK_L": blocks.LISTED},
            warps=min(max(held // 1024, 4), 16),
        )  # fmt: skip
    return results


def drawing() -> dict[str, Any]:
    """From a vocabulary of 152,064, by all filters and by none."""
    options = {"columns": WIDE, "by_row": "i32", "by_column": "i32"}
    rows, mass = {"logits": HALF, "stride": "i32", **options}, {"peaks": WIDE, "masses": WIDE}
    state, sizes = {"found": WIDE, "numbers": WHOLE}, {"rows": "i32", "size": "i32", "parts": "i32"}
    part, parts, cuts = {"PART": filter.PART}, {"PARTS": 128}, {"CUTS": filter.CUTS, "SHIFT": 16}
    results = {"peaks": built(filter._peak, rows | mass | sizes, part, filter.WARPS)}
    narrowed = rows | state | {"above": WIDE} | sizes
    results["narrow"] = built(filter._narrow, narrowed, part | cuts, filter.WARPS)
    picked = options | state | {"above": WIDE, "earlier": WIDE} | sizes
    for by_mass in (False, True):
        begun = options | mass | state | sizes
        name = "by mass" if by_mass else "by count"
        results[f"begin {name}"] = built(filter._begin, begun, parts | {"SHIFT": 16, "BY_MASS": by_mass})
        for last in (False, True):
            constants = parts | cuts | {"BY_MASS": by_mass, "LAST": last, "THEN_MASS": True}
            results[f"pick {name}{', at last' * last}"] = built(filter._pick, picked, constants)
    won, found = {"scores": WIDE, "winners": SHORT}, state | {"earlier": WIDE}
    for filtered in (True, False):
        kinds, name = {"FILTERED": filtered, "SHIFT": 16}, "filtered" if filtered else "free"
        applied = rows | found | {"made": WIDE} | sizes
        results[f"apply, {name}"] = built(filter._apply, applied, part | kinds | {"PROBS": True}, filter.WARPS)
        drawn = rows | found | {"picked": WHOLE, "keys": WHOLE, "step": WHOLE, "history": WIDE} | won | sizes
        results[f"draw, {name}"] = built(race._draw, drawn, part | kinds | {"PICKED": True, "KEEP": True}, filter.WARPS)
    few = {"values": WIDE, "stride": "i32", "made": WIDE, "size": "i32", "parts": "i32"}
    results["largest"] = built(top._largest, few, part | {"N": 3}, filter.WARPS)
    raced = {"weights": WIDE, "stride": "i32", "keys": WHOLE} | won | sizes
    results["race"] = built(race._race, raced, part, filter.WARPS)
    given = dict.fromkeys(("seed", "position", "stream", "made"), WHOLE) | {"columns": "i32", "size": "i32"}
    given |= {name + place: "i32" for name in "spt" for place in "01"}
    results["keys"] = built(race._keys, given, {"BLOCK": race.KEYS, "UNIFORM": False}, 1)
    return results | {"winner": built(race._winner, won | {"tokens": WHOLE, "parts": "i32"}, {"IF_NAN": -1} | parts)}


if __name__ == "__main__":
    main()
