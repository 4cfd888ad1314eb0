"""Fits the costs of steps to a step log.

The features are those of ``StepTimeModel``. That model follows a machine whose speed changes, so the newest steps count
most; this fit weighs all steps equally. It minimizes the absolute values of the relative errors, with no cost below
zero, and with the bend that makes these errors least. What steps took beyond it is kept as noise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.simulation.costs import (
    MESSAGE_S,
    REQUEST_S,
    DraftRates,
    MeasuredFactor,
    ServiceCosts,
    SimulatedCosts,
    StepCosts,
    StepNoise,
)
from penstock.scheduler.simulation.step_log import LoggedStep, StepLog, StepLogError
from penstock.scheduler.timing.step_time import step_features

MIN_STEPS = 32
MIN_DIFFERENT = 8
"""The minimum number of steps with different work: there are as many costs."""
WAY_S, MAX_WAY_S = 0.00025, 0.02
"""The usual time of a plan and its result on their way between the processes, if cores are free; and the limit of what
counts."""
MAX_FACTOR = 3.0
"""The maximum factor that is kept as noise. A step that took longer was stopped by another program."""
_BENDS = (2, 4, 8, 16, 32, 64, 128)
_MIN_BENT = 16
"""The minimum number of steps with more rows than a bend."""
_MIN_GAIN = 0.01
"""The share by which a bend must lessen the error: it may not come from noise."""
_ROUNDS = 16
_EXACT = 0.01
"""Smaller relative errors than this all count the same."""
_SWEEPS = 200
_DAMPING = 1e-9
_RARE_DRAFTS = 0.005

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """The costs that were fitted, and how well they match the log."""

    costs: SimulatedCosts
    num_steps: int
    median_error: float
    """The median of the relative errors of the predicted times."""
    most_tokens: int
    """Prompt tokens and decoding rows of the step that had the most."""
    most_rows: int
    """Decoding rows of the step that had the most."""


def fit_costs(log: StepLog) -> Fit:
    """Returns the costs of the steps in a log. Raises StepLogError if they are too few or too similar."""
    steps = [step for step in log.steps if step.seconds > 0]
    _check_enough(steps)
    features = np.array([step_features(step.work, 1, step.drafts) for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps])
    copy_s = log.header.facts.copy_us_per_block * 1e-6
    seconds = np.maximum(seconds - copy_s * np.array([step.copied_blocks for step in steps]), seconds / 2)
    costs = _fit_steps(features, seconds)
    predicted = np.maximum([costs.seconds(step.work, step.drafts) for step in steps], 1e-9)
    factors, has_chunks = seconds / predicted, features[:, 5] > 0
    noise = StepNoise(*(_noise(seconds[kind], factors[kind]) for kind in (~has_chunks, has_chunks)))
    return Fit(
        SimulatedCosts(costs, noise, _service_costs(steps), _draft_rates(log), copy_s),
        len(steps),
        float(np.median(np.abs(1 / factors - 1))),
        max(step.prefill_tokens + step.decodes for step in steps),
        max(step.decodes for step in steps),
    )


def _check_enough(steps: Sequence[LoggedStep]) -> None:
    """Raises StepLogError if the costs cannot be fitted."""
    different = {step.work for step in steps}
    problem = ""
    if len(steps) < MIN_STEPS:
        problem = f"has {len(steps)} steps, and a fit needs {MIN_STEPS}"
    elif len(different) < MIN_DIFFERENT:
        problem = f"has {len(different)} different steps, and a fit needs {MIN_DIFFERENT}"
    elif not any(step.chunks for step in steps):
        problem = "has no step with a prompt"
    elif not any(step.decodes for step in steps):
        problem = "has no step with decoding rows"
    if problem:
        raise StepLogError(
            f"{problem}; log a longer and more varied load, such as penstock bench --rate 5 --prompt-tokens "
            "lognormal:300,200 --output-tokens uniform:16-96"
        )


def _fit_steps(features: Floats, seconds: Floats) -> StepCosts:
    """Returns the costs with the bend that makes the errors least, or without one."""
    rows = features[:, 3]
    bends = [bend for bend in _BENDS if np.count_nonzero(rows > bend) >= _MIN_BENT]
    best, least = StepCosts(), np.inf
    for bend in (None, *bends):
        bent = features if bend is None else np.column_stack((features, np.maximum(0, rows - bend)))
        coefficients = _fit_relative(bent, seconds)
        error = float(np.abs(bent @ coefficients / seconds - 1).mean())
        if error < (1 - _MIN_GAIN) * least:
            best, least = StepCosts(*map(float, coefficients))._replace(bend=float(bend or 0)), error
    return best


def _fit_relative(features: Floats, seconds: Floats) -> Floats:
    """Returns the costs, none below zero, with the least sum of absolute errors relative to the times. So half of the
    steps take longer than predicted, and it does not matter how much longer: what slows a machine down for a while also
    lets queues grow, and would count as a cost of rows."""
    relative = features / seconds[:, None]
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        roots = np.sqrt(weights)
        coefficients = _non_negative(relative * roots[:, None], roots)
        weights = 1 / np.maximum(np.abs(relative @ coefficients - 1), _EXACT)
    return coefficients


def _non_negative(features: Floats, targets: Floats) -> Floats:
    """Returns the least squares solution with no coefficient below zero, by coordinate descent."""
    scales = np.sqrt((features**2).sum(axis=0))
    used = np.flatnonzero(scales)
    scaled = features[:, used] / scales[used]
    products: Any = (scaled.T @ scaled + _DAMPING * np.eye(len(used))).tolist()
    sums: Any = (scaled.T @ targets).tolist()
    found = [0.0] * len(used)
    for _ in range(_SWEEPS):
        for index, row in enumerate(products):
            rest = sums[index] - sum(map(float.__mul__, row, found))
            found[index] = max(0.0, found[index] + rest / row[index])
    coefficients = np.zeros(features.shape[1])
    coefficients[used] = np.array(found) / scales[used]
    return coefficients


def _noise(seconds: Floats, factors: Floats) -> Sequence[MeasuredFactor]:
    """Returns the factors of steps of one kind, with their times."""
    measured = zip(np.cumsum(seconds).tolist(), np.minimum(factors, MAX_FACTOR).tolist(), strict=True)
    return [MeasuredFactor(*each) for each in measured] or [MeasuredFactor(0.0, 1.0)]


def _service_costs(steps: Sequence[LoggedStep]) -> ServiceCosts:
    """Returns the time that steps took outside of the worker."""
    # If the worker waited for the plan, everything beside the step itself is on the way between the processes.
    ways = [max(0.0, step.answered_s - step.submitted_s - step.seconds) for step in steps if step.waited_s > 0]
    way_s = float(np.median(ways)) if ways else 0.0
    num_rows = np.array([step.chunks + step.decodes for step in steps], dtype=np.float64)
    handled = np.maximum(np.array([step.handled_s for step in steps]), 1e-6)
    base_s, row_s = map(float, _fit_relative(np.stack([np.ones(len(steps)), num_rows], axis=1), handled))
    # A request and a message pass several threads and processes, each of which may have to wait for a core. So their
    # time on the way is like a mean of many such times.
    busier = max(1.0, float(np.mean(np.minimum(ways, MAX_WAY_S))) / WAY_S) if ways else 1.0
    return ServiceCosts(way_s / 2, way_s / 2, base_s, row_s, REQUEST_S * busier, MESSAGE_S * busier)


def _draft_rates(log: StepLog) -> DraftRates:
    """Returns how much was drafted, and nothing if that was rare."""
    decodes, drafts = (sum(getattr(step, name) for step in log.steps) for name in ("decodes", "drafts"))
    per_row = drafts / decodes if decodes else 0.0
    if per_row < _RARE_DRAFTS or not log.header.max_drafts:
        return DraftRates()
    return DraftRates(per_row, sum(step.accepted for step in log.steps) / drafts, log.header.max_drafts)
