"""Runs a compiled kernel's PTX on a CPU, all threads of a program at once: for kernels that Triton's interpreter does
not know. Only what our kernels use; whatever is unknown raises, and so does an address that belongs to no tensor."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

GAP = 1 << 16  # bytes between tensors that belong to nobody
INTEGERS = {"s16": np.int16, "s32": np.int32, "s64": np.int64, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}
BITS = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
Array = Any


class Memory:
    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.places, size = tensors, list[int](), GAP
        for tensor in tensors:
            self.places.append(size)
            size += -(-tensor.numel() * tensor.element_size() // 256) * 256 + GAP
        self.bytes, self.known = np.zeros(size, np.uint8), np.zeros(size, bool)
        for tensor, place in zip(tensors, self.places, strict=True):
            raw = _raw(tensor)
            self.bytes[place : place + len(raw)], self.known[place : place + len(raw)] = raw, True

    def load(self, address: Array, size: int) -> Array:
        at = address[:, None].astype(np.int64) + np.arange(size)
        assert self.known[at].all(), "an address that belongs to no tensor"
        assert (address % size == 0).all(), "not aligned"
        return self.bytes[at]

    def store(self, address: Array, raw: Array) -> None:
        at = address[:, None].astype(np.int64) + np.arange(raw.shape[1])
        assert self.known[at].all(), "an address that belongs to no tensor"
        self.bytes[at] = raw

    def back(self) -> None:
        """Into the tensors."""
        for tensor, place in zip(self.tensors, self.places, strict=True):
            raw = self.bytes[place : place + tensor.numel() * tensor.element_size()]
            tensor.copy_(torch.from_numpy(raw.copy()).view(tensor.dtype).view(tensor.shape))


def _raw(tensor: Tensor) -> Array:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def launch(ptx: str, arguments: list[Tensor | int], grid: tuple[int, int, int], threads: int) -> None:
    """Tensors are contiguous and on a CPU; what the kernel writes is in them afterwards."""
    memory = Memory([a for a in arguments if isinstance(a, Tensor)])
    places = iter(memory.places)
    given = [next(places) if isinstance(a, Tensor) else a for a in arguments]
    code, labels = _parsed(ptx)
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                _Program(memory, given, (x, y, z), threads).run(code, labels)
    memory.back()


def _parsed(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    code, labels = list[tuple[str, str, list[str]]](), dict[str, int]()
    text = re.sub(r"//[^\n]*|\n\s*\.(loc|pragma)[^\n]*", "", ptx[ptx.index("{", ptx.index(".reqntid")) :])
    scope, scopes = 0, 0
    for line in re.sub(r"(\$L\w+:)", r"\1;", text).replace("\n", " ").split(";"):
        line = line.strip()
        while line[:1] in ("{", "}"):  # names of inline assembly are its own
            scopes += line[0] == "{"
            scope, line = scopes if line[0] == "{" else 0, line[1:].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line and not line.startswith("."):
            found = re.fullmatch(r"(@!?%p\d+ +)?(\S+) *(.*)", line)
            assert found is not None, line
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[3])
            own = [re.sub(r"(?<![%\w$.])([a-z]\d?)(?![\w.])", rf"{scope}_\1", o) for o in operands]
            code.append(((found[1] or "").strip(), found[2], own))
    return code, labels


class _Program:
    def __init__(self, memory: Memory, given: list[int], place: tuple[int, int, int], threads: int) -> None:
        self.memory, self.given, self.threads = memory, given, threads
        self.shared = np.zeros(1 << 18, np.uint8)
        self.registers: dict[str, Array] = {f"%ctaid.{n}": self.all(v) for n, v in zip("xyz", place, strict=True)}
        self.registers |= {"%tid.x": np.arange(threads, dtype=np.uint64), "global_smem": self.all(0)}

    def all(self, value: int) -> Array:
        return np.full(self.threads, value & (2**64 - 1), np.uint64)

    def run(self, code: list[tuple[str, str, list[str]]], labels: dict[str, int]) -> None:
        at = 0
        while code[at][1] != "ret":
            guard, name, operands = code[at]
            at += 1
            active = np.ones(self.threads, bool)
            if guard:
                active = self.registers[guard.strip("@!")].astype(bool) ^ ("!" in guard)
            if name.startswith("bra"):
                assert active.all() or not active.any(), "threads part"
                at = labels[operands[0]] if active.all() else at
            else:
                self.step(name.split("."), operands, active)

    def bits(self, operand: str) -> Array:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            return self.all(int(operand[2:], 16))
        return self.all(int(operand.rstrip("U"), 0))

    def value(self, operand: str, kind: str) -> Array:
        bits = self.bits(operand)
        if kind in ("f32", "f16"):
            width = {"f32": np.uint32, "f16": np.uint16}[kind]
            return bits.astype(width).view({"f32": np.float32, "f16": np.float16}[kind]).astype(np.float32)
        if kind == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return bits.astype(BITS.get(kind, np.uint64) if kind in BITS else INTEGERS[kind])

    def put(self, target: str, value: Array, kind: str) -> None:
        if kind == "f32":
            value = value.astype(np.float32).view(np.uint32)
        elif kind == "f16":
            value = value.astype(np.float16).view(np.uint16)
        elif kind == "bf16":
            raw = value.astype(np.float32).view(np.uint32)
            value = (raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        width = {"16": np.uint16, "32": np.uint32, "64": np.uint64}[kind[-2:]]
        self.registers[target] = value.astype(width).astype(np.uint64)

    def step(self, name: list[str], operands: list[str], active: Array) -> None:
        op, kind = name[0], name[-1]
        if op in ("bar", "griddepcontrol", "createpolicy", "prefetch"):
            return
        if op in ("ld", "st"):
            self.access(name, operands, active)
        elif op == "ldmatrix":
            self.matrices(operands)
        elif op == "mma":
            self.mma(name[-2], [o.strip("{} ").replace(" ", "").split(",") for o in operands])
        elif op == "setp":
            self.registers[operands[0]] = self.compare(name[1], *(self.value(o, kind) for o in operands[1:]))
        elif op == "shfl":
            other = np.arange(self.threads) ^ int(operands[2], 0)
            self.registers[operands[0]] = self.bits(operands[1])[other]
        elif kind == "pred":
            one = [self.bits(o).astype(bool) for o in operands[1:]]
            made = {"mov": lambda: one[0], "and": lambda: one[0] & one[1], "or": lambda: one[0] | one[1]}[op]()
            self.registers[operands[0]] = made.astype(np.uint64)
        elif op == "mov" and operands[0].startswith("{"):
            low, high = operands[0].strip("{} ").replace(" ", "").split(",")
            whole = self.bits(operands[1])
            self.put(low, whole & np.uint64(0xFFFF), "b16")
            self.put(high, whole >> np.uint64(16), "b16")
        elif op == "mov" and operands[1].startswith("{"):
            low, high = (self.bits(o) for o in operands[1].strip("{} ").replace(" ", "").split(","))
            self.put(operands[0], low | high << np.uint64(16), "b32")
        elif op == "cvt":
            source, target = kind, name[-2]
            self.put(operands[0], self.value(operands[1], source).astype(INTEGERS.get(target, np.float32)), target)
        elif op == "selp":
            where = self.bits(operands[3]).astype(bool)
            self.registers[operands[0]] = np.where(where, self.bits(operands[1]), self.bits(operands[2]))
        elif op == "prmt":
            both = self.bits(operands[1]) & np.uint64(0xFFFFFFFF) | self.bits(operands[2]) << np.uint64(32)
            selector = [int(digit, 16) for digit in operands[3].strip("U")[:1:-1].ljust(4, "0")]
            parts = [(both >> np.uint64(8 * n) & np.uint64(255)) << np.uint64(8 * i) for i, n in enumerate(selector)]
            self.put(operands[0], sum(parts[1:], parts[0]), "b32")
        elif op == "lop3":
            a, b, c = (self.bits(o) for o in operands[1:4])
            assert operands[4] == "0xea", "a and b, or c"
            self.put(operands[0], a & b | c, "b32")
        else:
            with np.errstate(over="ignore"):
                self.put(operands[0], *self.arithmetic(op, name, kind, operands[1:]))

    def compare(self, how: str, a: Array, b: Array) -> Array:
        made = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[how]
        return made.astype(np.uint64)

    def arithmetic(self, op: str, name: list[str], kind: str, operands: list[str]) -> tuple[Array, str]:
        if op in ("shl", "shr"):
            value = self.value(operands[0], kind)
            by = self.bits(operands[1]).astype(value.dtype)
            return (value << by if op == "shl" else value >> by), kind
        if op == "bfe":
            a, first, length = (self.bits(o) for o in operands)
            return a >> first & ((np.uint64(1) << length) - np.uint64(1)), kind
        v = [self.value(o, kind) for o in operands]
        if "wide" in name:
            wide = kind[0] + "64"
            made = v[0].astype(INTEGERS[wide]) * v[1].astype(INTEGERS[wide])
            return (made + self.value(operands[2], wide) if op == "mad" else made), wide
        match op:
            case "mov":
                return v[0], kind
            case "add":
                return v[0] + v[1], kind
            case "sub":
                return v[0] - v[1], kind
            case "mul":
                return v[0] * v[1], kind
            case "mad":
                return v[0] * v[1] + v[2], kind
            case "fma":
                return (v[0].astype(np.float64) * v[1] + v[2]).astype(np.float32), kind
            case "div":
                return v[0] / v[1], kind
            case "ex2":
                return np.exp2(v[0]), kind
            case "neg":
                return -v[0], kind
            case "min":
                return np.minimum(*v), kind
            case "max":
                return np.maximum(*v), kind
            case "and":
                return v[0] & v[1], kind
            case "or":
                return v[0] | v[1], kind
            case "xor":
                return v[0] ^ v[1], kind
            case "not":
                return ~v[0], kind
        raise NotImplementedError(".".join(name))

    def access(self, name: list[str], operands: list[str], active: Array) -> None:
        width = int(name[-1][1:]) // 8
        if "param" in name:
            index = re.search(r"param_(\d+)", operands[0] + operands[1])
            assert index is not None
            self.put(operands[0], self.all(self.given[int(index[1])]), "b" + name[-1][1:])
            return
        place, held = operands[:2]
        if name[0] == "ld":
            place, held = held, place
        address = self.address(place)
        names = held.strip("{} ").replace(" ", "").split(",")
        size, address = width * len(names), address[active]
        local = np.arange(size)
        if name[0] == "st":
            raw = np.stack([self.bits(n)[active] for n in names], 1)
            data = np.concatenate([raw[:, i : i + 1].copy().view(np.uint8)[:, :width] for i in range(len(names))], 1)
            if "shared" in name:
                self.shared[address[:, None] + local] = data
            else:
                self.memory.store(address, data)
            return
        data = self.shared[address[:, None] + local] if "shared" in name else self.memory.load(address, size)
        for i, register in enumerate(names):
            whole = np.zeros((len(address), 8), np.uint8)
            whole[:, :width] = data[:, i * width : (i + 1) * width]
            before = self.registers.get(register, self.all(0)).copy()
            before[active] = whole.view(np.uint64)[:, 0]
            self.registers[register] = before

    def address(self, place: str) -> Array:
        found = re.fullmatch(r"\[ *([^ +\]]+) *(?:\+ *(-?\d+))? *\]", place)
        assert found is not None, place
        return self.bits(found[1]).astype(np.int64) + int(found[2] or 0)

    def matrices(self, operands: list[str]) -> None:
        """ldmatrix: each eight threads have the addresses of a matrix's rows, of which every thread gets two halves."""
        lane, names = np.arange(self.threads), operands[0].strip("{} ").replace(" ", "").split(",")
        address = self.address(operands[1])
        for i, name in enumerate(names):
            own = address[lane // 32 * 32 + i * 8 + lane % 32 // 4] + lane % 4 * 4
            self.registers[name] = self.shared[own[:, None] + np.arange(4)].view(np.uint32)[:, 0].astype(np.uint64)

    def mma(self, kind: str, operands: list[list[str]]) -> None:
        """m16n8k16, as the PTX manual draws its fragments."""
        lane, warps = np.arange(32), self.threads // 32
        g, t = lane // 4, lane % 4
        a, b = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for i, register in enumerate(operands[1]):
            for half in range(2):
                bits = self.bits(register) >> np.uint64(16 * half) & np.uint64(0xFFFF)
                a[:, g + i % 2 * 8, t * 2 + half + i // 2 * 8] = self.half(bits, kind).reshape(warps, 32)
        for i, register in enumerate(operands[2]):
            for half in range(2):
                bits = self.bits(register) >> np.uint64(16 * half) & np.uint64(0xFFFF)
                b[:, t * 2 + half + i * 8, g] = self.half(bits, kind).reshape(warps, 32)
        made = a @ b
        for i, (target, before) in enumerate(zip(operands[0], operands[3], strict=True)):
            part = made[:, g + i // 2 * 8, t * 2 + i % 2].reshape(-1)
            self.put(target, (part + self.value(before, "f32")).astype(np.float32), "f32")

    def half(self, bits: Array, kind: str) -> Array:
        if kind == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
