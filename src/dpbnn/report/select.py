"""Choosing the most and least certain test records, and a band of predictions, for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn.report.page import Band, Example, Examples

if TYPE_CHECKING:
    from dpbnn.predictive import Predictive


def select_examples(
    predictive: Predictive,
    y: Any,
    *,
    images: Any = None,
    rows: Sequence[dict[str, Any]] | None = None,
    classes: Sequence[Any] = (),
    count: int = 3,
) -> Examples:
    """Return the `count` most and least certain test records.

    The most certain have the lowest predictive entropy (classes) or predictive std (real targets).
    Ties keep their order.

    Args:
        predictive: predictions on the test records.
        y: their class indices or real targets, [N].
        images: grey values [N, h, w] or colours [N, h, w, 3], in 0..1.
        rows: columns and values of every record, where they are no images.
        classes: names of the classes.
        count: how many of each.
    """
    y = np.asarray(y)
    real = hasattr(predictive, "means")
    if real and predictive.mean.dim() > 1:
        raise ValueError(
            f"the prediction has {predictive.mean.shape[1]} outputs; examples show one, so give a "
            f"prediction of one output, means [S, N]"
        )
    if y.shape != (len(predictive),):
        raise ValueError(
            f"y has shape {list(y.shape)}; it must be one label or target for each of the "
            f"{len(predictive)} predictions, shape [{len(predictive)}]"
        )
    score = _array(predictive.std if real else predictive.entropy)
    order = np.argsort(score, kind="stable")
    count = min(count, len(order) // 2)
    names = [str(c) for c in classes]
    if not real:
        names = names or [str(k) for k in range(predictive.mean.shape[-1])]

    def example(index: int) -> Example:
        if real:
            draws = _array(predictive.means[:, index])
            truth, prediction = f"{y[index]:.4g}", f"{float(predictive.mean[index]):.4g}"
        else:
            draws = _array(predictive.log_probabilities[:, index].exp())
            truth, prediction = names[int(y[index])], names[int(predictive.mode[index])]
        return Example(
            name=f"test record {index}",
            truth=truth,
            prediction=prediction,
            uncertainty=float(score[index]),
            draws=draws,
            image=None if images is None else np.asarray(images[index]),
            row=None if rows is None else rows[index],
        )

    return Examples(
        certain=[example(int(i)) for i in order[:count]],
        uncertain=[example(int(i)) for i in order[::-1][:count]],
        classes=names,
    )


def band(predictive: Predictive, x: Any, **details: Any) -> Band:
    """Return the band of real predictions at positions `x` [N]; further details as in `Band`."""
    return Band(
        x=np.asarray(x, dtype=float),
        mean=_array(predictive.mean),
        epistemic=np.sqrt(_array(predictive.epistemic)),
        aleatoric=np.sqrt(_array(predictive.aleatoric)),
        bounds=getattr(predictive, "bounds", None),
        **details,
    )


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().double().numpy()
