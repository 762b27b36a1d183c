"""What must be there after a kill, by the ledger of the programs and by what was seen before.

The oracle is no second manager. It knows the saves of a run in their order, and which of them must
be there: those that returned, and that each rule in force since then surely keeps. A step that a
rule could have removed is never asked for again, and neither is one that it has not been sure of.
So it may miss a loss, and never reports one that docs/manager.md allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .ledger import Line
from .look import Entry, Seen
from .rules import Rules, Saved, is_number

Found = dict[str, Any]


class Oracle:
    """Follows one run from its first save on, and collects the promises that were broken."""

    def __init__(self) -> None:
        self.rules = Rules()
        self.broken: list[str] = []
        self.here: list[Saved] = []
        """Saves that may be in the run's directory, oldest first."""
        self.there: list[Saved] = []
        """Saves that may be on a tier, among them those here, since they may be copied."""
        self.must: set[Saved] = set()
        """Saves that must be here, or on every tier if they may have left."""
        self.must_on_tiers: set[Saved] = set()
        """Saves of which `wait_promoted` has said that each tier has them."""
        self.newest: Saved | None = None
        """The newest save that must be there: what is restored is this one or a later one."""
        self.pinned: set[int] = set()
        self.perhaps_pinned: set[int] = set()
        self.linked: set[int] = set()
        """Steps that a link of the user's leads to: these stay here."""
        self.refused: list[Line] = []
        """Saves that were refused, since the user has something of that name."""
        self._pending: list[Saved] = []
        """Saves that were begun and may be committed."""
        self._numbers: set[int] = set()
        self._since_open: set[Saved] = set()
        """Saves of the manager that is open."""

    @property
    def has_saved(self) -> bool:
        """Whether the manager that is open has saved, and so holds the run."""
        return bool(self._since_open)

    # What the programs have noted.

    def follow(self, lines: Iterable[Line]) -> None:
        """Take note of what a program has done."""
        steps: dict[tuple[str, str], Callable[[Line], None]] = {
            ("open", "end"): self._opened,
            ("save", "begin"): self._begun,
            ("save_async", "begin"): self._begun,
            ("save", "end"): self._saved,
            ("save_async", "end"): self._in_background,
            ("result", "end"): lambda line: self._commit(line["save"]),
            ("restore", "end"): self._restored,
            ("go_back", "begin"): self._goes_back,
            ("go_back", "end"): self._went_back,
            ("keep", "begin"): lambda line: self.perhaps_pinned.add(line["step"]),
            ("keep", "end"): self._kept,
            ("release", "begin"): self._releases,
            ("release", "end"): self._released,
            ("latest", "end"): self._latest,
            ("steps", "end"): self._listed,
            ("best", "end"): self._best,
            ("wait", "end"): lambda line: self._commit(),
            ("wait_promoted", "end"): self._promoted,
            # Steps leave for the tiers once these have them, at the latest now.
            ("close", "begin"): lambda line: self._let_go(),
            ("close", "end"): self._closed,
            ("program", "failed"): lambda line: self._break(f"a call failed:\n{line['error']}"),
        }
        for line in lines:
            if step := steps.get((line["what"], line["when"])):
                step(line)

    def _break(self, text: str) -> None:
        self.broken.append(text)

    def _opened(self, line: Line) -> None:
        self.rules = Rules.read(line["rules"])
        self._since_open = set()

    def _begun(self, line: Line) -> None:
        # The first save after a restore removes what a kill has left, before it begins.
        self._let_go()
        self._pending.append(Saved(line["save"], line["step"], line["loss"]))
        self._numbers.add(line["save"])
        # Its copy takes the place of that of the earlier save.
        self.must_on_tiers = {one for one in self.must_on_tiers if one.step != line["step"]}

    def _saved(self, line: Line) -> None:
        if "refused" in line:
            self._forget(line)
        self._commit(line["save"])

    def _in_background(self, line: Line) -> None:
        if "refused" in line or line["skipped"]:
            self._forget(line)
        if not line.get("skipped"):
            self._commit(line["save"] - 1)  # it has waited for those before

    def _forget(self, line: Line) -> None:
        """Take a save for one that never began."""
        if "refused" in line:
            self.refused.append(line)
        self._pending = [one for one in self._pending if one.number != line["save"]]

    def _commit(self, number: float = math.inf) -> None:
        """Take note that all saves up to this one are committed: the call waits for them."""
        while self._pending and self._pending[0].number <= number:
            saved = self._pending.pop(0)
            # It replaces the earlier save of the step here, and its copy those on the tiers.
            self.must = {one for one in self.must if one.step != saved.step}
            self.here = [one for one in self.here if one.step != saved.step] + [saved]
            self.there.append(saved)
            self.must.add(saved)
            self.newest = saved
            self._since_open.add(saved)
            self._let_go()

    def _let_go(self) -> None:
        """Ask no longer for what the rules in force may remove by now."""
        for saved in self.here:
            newer = sum(one.number > saved.number for one in self.here)
            if self._is_held(saved):
                continue
            if self.rules.slim_after is not None and newer >= self.rules.slim_after:
                saved.lost.update(self.rules.slim)
            if self.rules.keep_here is not None and newer >= self.rules.keep_here:
                saved.may_leave = True
        self.must = {saved for saved in self.must if self._stays(saved)}
        self.must_on_tiers = {saved for saved in self.must_on_tiers if self._stays_there(saved)}

    def _is_held(self, saved: Saved) -> bool:
        return saved.step in self.pinned or saved.step in self.linked

    def _stays(self, saved: Saved) -> bool:
        if saved is self.newest or self._is_held(saved):
            return True
        is_here = self.rules.here.surely_keeps(saved, self.here)
        return is_here and (not saved.may_leave or self._stays_there(saved))

    def _stays_there(self, saved: Saved) -> bool:
        is_pinned = saved.step in self.pinned
        return is_pinned or self.rules.there.surely_keeps(saved, self.there)

    def _known(self, found: Found) -> Saved | None:
        """Return the save that was found; None if it may not be there, which is noted."""
        for saved in [*self.there, *self.here]:
            if saved.number == found["save"]:
                if saved.step != found["step"]:
                    self._break(f"{saved} is found as {found}")
                return saved
        self._break(f"found, but it is gone or was never saved: {found}")
        return None

    # What the calls have returned.

    def _restored(self, line: Line) -> None:
        self._commit()
        found = line["found"]
        if found is None:
            self._need_newest(None, "restore")
        elif (saved := self._known(found)) is not None:
            self._compare(saved, found)
            self._need_newest(saved, "restore")
            self._found_newest(saved)

    def _found_newest(self, saved: Saved) -> None:
        self.newest = saved
        # It may be on one tier alone, if a kill has cut short the removal of newer steps.
        if saved in self.here:
            self.must.add(saved)

    def _compare(self, saved: Saved, found: Found) -> None:
        """Check the bytes of a step that was loaded, and that it lacks only what it may."""
        if found["wrong"]:
            self._break(f"{saved} is loaded with other values: {found['wrong'][:5]}")
        lost = set(found.get("dropped", ())) - saved.lost
        if lost:
            self._break(f"{saved} has lost {lost}, which slim_after keeps")

    def _need_newest(self, saved: Saved | None, call: str) -> None:
        if self.newest is not None and (saved is None or saved.number < self.newest.number):
            self._break(f"{call} returns {saved}, not the newest: {self.newest}")

    def _goes_back(self, line: Line) -> None:
        self._commit()
        if not line["drops"]:
            return
        target = self._of_step(line["step"])
        if target is None:
            return
        for saved in list(self.must):
            if saved.number > target.number and saved.step not in self.pinned:
                self.must.remove(saved)
        self.must_on_tiers &= self.must
        self.newest = target

    def _of_step(self, step: int) -> Saved | None:
        """Return the last save of a step."""
        of_step = [saved for saved in [*self.there, *self.here] if saved.step == step]
        return max(of_step, key=lambda saved: saved.number, default=None)

    def _went_back(self, line: Line) -> None:
        saved = self._known(line["found"])
        if saved is None:
            return
        self._compare(saved, line["found"])
        if saved is not self._of_step(line["step"]):
            self._break(f"restore({line['step']}) returns {saved}, which is not its last save")
        if line["drops"]:
            self._drop_after(saved)

    def _drop_after(self, target: Saved) -> None:
        """Take note that all newer steps are gone, except those that `keep` keeps."""
        held = self.pinned | self.perhaps_pinned

        def stays(saved: Saved) -> bool:
            return saved.number <= target.number or saved.step in held

        self.here = [saved for saved in self.here if stays(saved)]
        self.there = [saved for saved in self.there if stays(saved)]
        pinned = [saved for saved in self.must if saved.number > target.number]
        self.newest = max(pinned, key=lambda saved: saved.number, default=target)
        self.must.add(target)

    def _kept(self, line: Line) -> None:
        self._commit()
        self.pinned.add(line["step"])
        for saved in self.here:
            if saved.step == line["step"]:
                saved.may_leave = False  # `keep` is for what is in the run's directory
                self.must.add(saved)

    def _releases(self, line: Line) -> None:
        self.pinned.discard(line["step"])
        self.perhaps_pinned.add(line["step"])

    def _released(self, line: Line) -> None:
        self._commit()
        self.perhaps_pinned.discard(line["step"])
        if not line["was_kept"]:
            self._break(f"release says that step {line['step']} was not kept")

    def _latest(self, line: Line) -> None:
        self._commit()
        found = line["found"]
        saved = None if found is None else self._known(found)
        if found is None or saved is not None:
            self._need_newest(saved, "latest")

    def _listed(self, line: Line) -> None:
        self._commit()
        found = [self._known(one) for one in line["found"]]
        numbers = [saved.number for saved in found if saved is not None]
        if numbers != sorted(numbers):
            self._break(f"steps are not listed oldest first: {line['found']}")
        missing = [one for one in self.must if not one.may_leave and one not in found]
        self._report_lost(missing, "steps() lists")

    def _best(self, line: Line) -> None:
        self._commit()
        sign = 1 if line["mode"] == "min" else -1
        losses = [sign * one.loss for one in self.must if is_number(one.loss)]
        found = line["found"]
        if found is None:
            if losses:
                self._break("best() finds no step")
            return
        saved = self._known(found)
        if saved is None:
            return
        if not is_number(saved.loss):
            self._break(f"best() returns {saved}")
        elif min(losses, default=math.inf) < sign * saved.loss:
            self._break(f"best({line['mode']}) returns {saved}, and there is a better one")

    def _promoted(self, line: Line) -> None:
        self._commit()
        if not line["all"]:
            self._break("wait_promoted says that a copy failed")
        else:
            self._is_on_tiers()

    def _closed(self, line: Line) -> None:
        self._commit()
        self._is_on_tiers()

    def _is_on_tiers(self) -> None:
        """Take note that the copies of the newest step are there, if this manager saved it."""
        if self.newest in self._since_open:
            self.must_on_tiers.add(self.newest)

    # What a fresh process has seen.

    def compare(self, seen: Seen) -> None:
        """Check what was found after a kill, and take it for what there is from now on."""
        if seen.error is not None:
            self._break(f"a look at the run failed:\n{seen.error}")
            return
        self._settle_pending(seen)
        for place in seen.places:
            self._compare_entries(place)
        self._compare_newest(seen)
        self._compare_must(seen)
        self._take_over(seen)

    def _settle_pending(self, seen: Seen) -> None:
        """Decide which saves were committed whose result nobody has learned."""
        numbers = [entry.save or 0 for place in seen.places for entry in place]
        numbers += [seen.restored["save"]] if seen.restored else []
        self._commit(max(numbers, default=0))
        self._pending = []

    def _compare_entries(self, place: list[Entry]) -> None:
        for entry in place:
            if entry.status == "damaged":
                self._break(f"{entry.name} is damaged: {entry.problem}")
            if entry.status != "committed" or entry.step is None:
                continue
            saved = self._known({"step": entry.step, "save": entry.save})
            if saved is not None:
                found = {"wrong": entry.wrong, "dropped": entry.dropped}
                self._compare(saved, found)

    def _compare_newest(self, seen: Seen) -> None:
        """Check that restore, latest and steps agree on the newest step."""
        run, *tiers = ([e for e in place if e.status == "committed"] for place in seen.places)
        there = [entry.save or 0 for place in (run, *tiers) for entry in place]
        restored = None if seen.restored is None else self._known(seen.restored)
        if restored is not None and seen.restored is not None:
            self._compare(restored, {"wrong": seen.restored["wrong"]})
        self._need_newest(restored, "restore")
        if (restored.number if restored else 0) != max(there, default=0):
            self._break(f"restore returns {restored}, and there is save {max(there, default=0)}")
        saves = [entry.save or 0 for entry in run]
        if saves != sorted(saves):
            self._break(f"ringstow.steps does not list the oldest first: {run}")
        if seen.latest != (run[-1].name if run else None):
            self._break(f"ringstow.latest is {seen.latest}, and the steps are {run}")

    def _compare_must(self, seen: Seen) -> None:
        has = [{e.save for e in place if e.status == "committed"} for place in seen.places]
        run, tiers = has[0], has[1:]
        lost, lost_there = [], []
        for saved in self.must:
            may_leave = saved.may_leave and not self._is_held(saved)
            is_there = bool(tiers) and all(saved.number in tier for tier in tiers)
            if saved.number not in run and not (may_leave and is_there):
                lost.append(saved)
        for saved in self.must_on_tiers:
            if not all(saved.number in tier for tier in tiers):
                lost_there.append(saved)
        self._report_lost(lost, "the run has")
        self._report_lost(lost_there, "not every tier has")

    def _report_lost(self, lost: list[Saved], text: str) -> None:
        for saved in sorted(lost, key=lambda one: one.number):
            self._break(f"lost: {saved}; {text} it no longer")

    def _take_over(self, seen: Seen) -> None:
        """Keep only the saves that were seen: no process is alive that could bring others back."""
        run, *tiers = ({entry.save for entry in place} for place in seen.places)
        there = set().union(run, *tiers)
        self.here = [saved for saved in self.here if saved.number in run]
        self.there = [saved for saved in self.there if saved.number in there]
        self.must = {saved for saved in self.must if saved.number in there}
        self.must_on_tiers &= set(self.there)
        if seen.restored is not None:
            saved = self._known(seen.restored)
            if saved is not None:
                self._found_newest(saved)

    def check_read(self, read: list[Found | None], newest: Saved | None) -> None:
        """Check what a reader beside the job has restored, since the newest was this one."""
        for found in read:
            if found is None:
                if newest is not None:
                    self._break(f"a reader beside the job finds nothing; there was {newest}")
            elif found["save"] not in self._numbers or found["wrong"]:
                self._break(f"a reader beside the job loads wrong values: {found}")
            elif newest is not None and found["save"] < newest.number:
                self._break(f"a reader beside the job loads {found}; there was {newest}")
