"""Changes of a module after you have wrapped it: parameters that were added, replaced or removed.

Torch's hooks of registration are global. They set a flag of the wrapped modules concerned. `register_parameter`, assignments,
`append` and `load_state_dict(assign=True)` call them. Code that writes into a module's dicts itself, such as
`nn.Sequential.insert`, changes the sizes of the dicts, which are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from ..errors import ModuleError

__all__ = ["ModuleChanges", "listed"]

_CONTAINERS = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict
_watched: dict[int, weakref.ref[ModuleChanges]] = {}
_handles: list[Any] = []


class ModuleChanges:
    """The parameters that a module had when it was wrapped, and a flag that it may have others now."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str]):
        self.module, self._ignored = module, ignored
        self._names = {id(p): name for name, p in self._parameters()}
        self._kept = [p for _, p in self._parameters()]  # an id belongs to one object while that lives
        held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items()]
        self._held = {(id(part), name) for part, name, _ in held}
        self._places = {id(p): (_getter(part._parameters), name) for part, name, p in reversed(held) if p is not None}
        self._gone: set[int] = set()
        self.may_differ = False
        """True if something was registered since the last check."""
        self._remember()
        _watched[id(self)] = weakref.ref(self)
        if not _handles:
            _handles.append(torch_modules.register_module_parameter_registration_hook(_registered))
            _handles.append(torch_modules.register_module_module_registration_hook(_registered))
        weakref.finalize(self, _unwatch, id(self)).atexit = False

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self._ignored]

    def _remember(self) -> None:
        """Take the module's present structure as known."""
        modules = list(self.module.modules())
        self._ids = {id(part) for part in modules}
        tables = ((part, table) for part in modules for table in (part._parameters, part._modules))
        self._dicts = [table for part, table in tables if table or isinstance(part, _CONTAINERS)]
        self._size = sum(map(len, self._dicts))
        places = ((_getter(part._parameters), n, p) for part in modules for n, p in part._parameters.items() if p is not None)
        self._first = next(places, ({}.get, "", None))
        """A parameter and its place. It shows if the module was moved or converted, which changes or replaces all of them."""
        self.may_differ = False

    def concerns(self, module: torch.nn.Module) -> None:
        """Note that something was registered in a module."""
        if id(module) in self._ids:
            self.may_differ = True

    def first_parameter(self) -> torch.nn.Parameter | None:
        """Return the present value at the place of one of the module's parameters."""
        get, name, _ = self._first
        return get(name)

    def check(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Return parameters that came after wrapping and need no gradient. Almost always there is nothing to check.

        Raise ModuleError for one that needs a gradient, as long as the module has it.
        """
        get, name, parameter = self._first
        if not self.may_differ and get(name) is parameter and sum(map(len, self._dicts)) == self._size:
            return ()
        self.may_differ = True
        present = dict(self._parameters())
        new = {name: p for name, p in present.items() if id(p) not in self._names}
        trained = [name for name, p in new.items() if p.requires_grad]
        if trained:
            ids = set(map(id, present.values()))
            gone = [name for key, name in self._names.items() if key not in ids]
            parts = dict(self.module.named_modules())
            places = {n: (id(parts[n.rpartition(".")[0]]), n.rpartition(".")[2]) for n in trained}
            replaced = [n for n in trained if n in gone or places[n] in self._held]
            kinds = {
                "replaced": replaced,
                "added": [name for name in trained if name not in replaced],
                "removed": [name for name in gone if name not in new],
            }
            texts = [
                f"{listed(names)} {'were' if len(names) > 1 else 'was'} {what} after wrapping"
                for what, names in kinds.items()
                if names
            ]
            raise ModuleError(
                f"{'; '.join(texts)}: gradients of new parameters would not be averaged. Wrap the module again, and give the "
                "optimizer its parameters; load_state_dict without assign=True keeps the old ones."
            )
        self._names |= {id(p): name for name, p in new.items()}
        self._kept += new.values()
        self._remember()
        return list(new.items())

    def check_unused(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raise ModuleError if parameters without a gradient were replaced, and no hook noticed."""
        for p in parameters:
            get, name = self._places[id(p)]
            if get(name) is not p and id(p) not in self._gone:
                self._gone.add(id(p))
                self.may_differ = True
                self.check()


def listed(names: Sequence[str]) -> str:
    """Return the first names of many, quoted."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _getter(table: Any) -> Callable[[str], Any]:
    """Return `table.get`, which the tables of TorchScript lack."""
    return table.get if isinstance(table, dict) else lambda name: dict(table.items()).get(name)


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    for reference in list(_watched.values()):
        if (changes := reference()) is not None:
            changes.concerns(module)


def _unwatch(key: int) -> None:
    del _watched[key]
    if not _watched:
        while _handles:
            _handles.pop().remove()
