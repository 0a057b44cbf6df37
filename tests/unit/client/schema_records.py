"""Classes of records, the same in each of the ways to write one."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum
from typing import TypedDict

import msgspec
import pydantic


class Color(Enum):
    RED = "RED"
    BLUE = "BLUE"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Item:
    name: str
    count: int = 1


@dataclass
class Order:
    id: int
    paid: bool
    price: float
    raw: bytes
    items: list[Item]
    labels: dict[str, str] = field(default_factory=dict)
    color: Color = Color.RED
    level: Level = Level.LOW
    note: str | None = None
    at: datetime | None = None


class StructOrder(msgspec.Struct):
    id: int
    note: str = "none"
    item: Item | None = None


class ModelOrder(pydantic.BaseModel):
    id: int
    note: str = "none"
    raw: bytes = b""


class RenamedStruct(msgspec.Struct, rename="camel"):
    order_id: int
    short_note: str = "none"


class AliasedModel(pydantic.BaseModel):
    order_id: int = pydantic.Field(alias="orderId")
    short_note: str = pydantic.Field("none", alias="shortNote")


class DictOrder(TypedDict):
    id: int
    note: str


@dataclass
class Tree:
    value: int
    children: list[Tree] = field(default_factory=list)


@dataclass
class First:
    id: int
    gone: str = "x"


@dataclass
class Second:
    """What `First` became: a field went, and one came."""

    id: int
    added: str | None = None
    more: str = "default"


@dataclass
class Bare:
    id: object
