"""Bounded nonlinear least squares: Gauss and Newton's steps, damped (Levenberg 1944, Marquardt 1963) and cut at the bounds."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
RELATIVE_STEP = 1e-5
ENOUGH = 1e-5
"""A step that improves the sum of squares by less than this share is the last one."""


def least_squares(
    residuals: Callable[[Vector], Vector], start: Vector, low: Vector, high: Vector, most_steps: int = 60
) -> Vector:
    """Return the values between ``low`` and ``high`` whose residuals have the least sum of squares, from ``start`` downhill.

    Values should be of the order of 1: differences are taken at a hundred thousandth of them, or of 1 if that is more.
    """
    values = np.clip(start, low, high)
    now = residuals(values)
    damping = 1e-3
    for _ in range(most_steps):
        slopes = jacobian(residuals, values, now, low, high)
        gradient = slopes.T @ now
        is_stuck = ((values <= low) & (gradient > 0)) | ((values >= high) & (gradient < 0))
        free = ~is_stuck & (low < high)
        if not free.any():
            break
        before = now @ now
        while damping < 1e10:
            square = slopes[:, free].T @ slopes[:, free]
            square[np.diag_indices_from(square)] += damping * (np.diag(square) + 1e-12)
            trial = values.copy()
            trial[free] -= np.linalg.solve(square, gradient[free])
            trial = np.clip(trial, low, high)
            then = residuals(trial)
            if then @ then < before:
                break
            damping *= 4
        else:
            break
        values, now = trial, then
        damping = max(damping / 10, 1e-9)
        if before - now @ now <= ENOUGH * before:
            break
    return values


def jacobian(residuals: Callable[[Vector], Vector], values: Vector, now: Vector, low: Vector, high: Vector) -> Vector:
    """Return the slopes of the residuals, by differences that stay between the bounds; 0 for values that may not change."""
    slopes = np.zeros((len(now), len(values)))
    for at in np.flatnonzero(low < high):
        value = values[at]
        step = RELATIVE_STEP * max(1.0, abs(value))
        if value + step > high[at]:
            step = -step
        moved = values.copy()
        moved[at] += step
        slopes[:, at] = (residuals(moved) - now) / step
    return slopes
