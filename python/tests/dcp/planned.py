"""Saves whose plans can be compared: those of `SavePlanner` beside those of torch's planner."""

from __future__ import annotations

import pickle

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ringstow.dcp import SavePlanner


class Recorder(dcp.StorageWriter):
    """Writes nothing; keeps the plans, and how many bytes of them travel."""

    def __init__(self):
        self.plan = None
        self.sent = self.answered = 0
        self.fails_in = None

    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        pass

    def prepare_local_plan(self, plan):
        self._fail("prepare_local_plan")
        self.sent = len(pickle.dumps(plan))
        return plan

    def prepare_global_plan(self, plans):
        self._fail("prepare_global_plan")
        self.answered = max(len(pickle.dumps(plan)) for plan in plans)
        return plans

    def write_data(self, plan, planner):
        self._fail("write_data")
        self.plan = plan
        for item in plan.items:
            planner.resolve_data(item)
        done = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata, results):
        self._fail("finish")

    def _fail(self, step):
        if self.fails_in == step:
            raise RuntimeError(f"{step} fails")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def planned(state, planner, writer=None, **options):
    """Save, and return this rank's final plan and the metadata, in comparable form."""
    writer = writer or Recorder()
    metadata = dcp.save(state, storage_writer=writer, planner=planner, **options)
    assert type(writer.plan) is SavePlan
    hints = [item.index.index for item in writer.plan.items]
    return writer.plan.items, hints, writer.plan.planner_data, metadata


def is_as_torch(state, kinds=(SavePlanner, DefaultSavePlanner), arguments=None, **options):
    """Compare two saves by our planner with one by torch's."""
    ours, torchs = kinds
    arguments = arguments or {}
    expected = planned(state, torchs(**arguments), **options)
    first = planned(state, ours(**arguments), **options)
    later = planned(state, ours(**arguments), **options)
    assert first == expected
    assert later == expected
    return len(expected[0])
