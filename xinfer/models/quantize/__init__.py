from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheme:
    bits: int = 4
    block: int = 32
    symmetric: bool = True
    method: str = "rtn"
