"""Newton's steps for many problems whose Hessians are 1 + X^T A X with the same X and diagonal A."""

from __future__ import annotations

import functools

import torch

from ..products import row_products

__all__ = ["NewtonSteps"]

_GRAM_ROWS = 12_000  # the products of more rows with one another take too much memory (600 MB)
_PRECISION = 0.05  # of a direction by conjugate gradients; the outer method is exact
_MOST_PRODUCTS = 300
_ROWS = 1024  # of products at once
_PIECE = 128  # rows whose squares stay in the processor's cache
_FEW = 200  # curved rows that are always solved directly
_SMALL = 2000  # of so few rows all are: the principal axes would cost more
# A matrix of a worse condition is not factorised in float32, and not made of products in float32.
_SINGLE, _ROUNDED = 1e6, 1e8


class NewtonSteps:
    """Directions -H^-1 gradient, each as is cheapest.

    A problem with few curved rows is solved directly: its Hessian is the identity plus a matrix of that
    rank (Woodbury). The others go through conjugate gradients together, in the principal axes of X, where
    the Hessian's diagonal is a good preconditioner. Which rows are few is learnt: when conjugate gradients
    took as long as the direct way would have, problems of that many rows are solved directly from then on.
    Both ways compute in float32 where that is precise enough for a step.

    Args:
        x: (N, D) float64.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self._lengths = x.square().sum(1)
        self._few = len(x) if len(x) <= _SMALL else _FEW
        self._products: torch.Tensor | None = None
        self._turned: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def _single(self) -> torch.Tensor:
        return self.x.float()

    def direction(self, gradient: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
        """Descent directions.

        Args:
            gradient: (P, D) float64.
            curvature: (P, N) float64, the diagonal of A, at least 0.

        Returns:
            (P, D) float64, about -H^-1 gradient.
        """
        out = torch.empty_like(gradient)
        curved = (curvature > 0).sum(1)
        direct = curved <= self._few
        if not direct.all():
            way, solved = self._conjugate(
                gradient[~direct], curvature[~direct], self._patience(curved[~direct])
            )
            out[~direct] = way
            direct[(~direct).nonzero()[~solved, 0]] = True
            if not solved.all():
                self._few = max(self._few, int(curved[direct].max()))
        if direct.any():
            out[direct] = self._direct(gradient[direct], curvature[direct])
        return out

    def _patience(self, curved: torch.Tensor) -> torch.Tensor:
        """(P,) products with the Hessian that cost as much as a direct solution."""
        rows = curved.double()
        direct = rows**3 / 3 + 250 * rows**2  # operations: the factor, and getting at the matrix
        if len(self.x) > _GRAM_ROWS:
            direct += 2 * self.x.shape[1] * rows**2
        product = 4 * self.x.numel() * (0.2 + 4 / len(curved))  # reading X is shared by all problems
        return (direct / product).clamp(1, _MOST_PRODUCTS)

    def _direct(self, gradient: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
        """-(g - X^T (A^-1 + X X^T)^-1 X g), over the rows where A isn't 0."""
        conditions = ((curvature > 0) * self._lengths).sum(1) * curvature.amax(1)  # at most
        if conditions.max() > _SINGLE:
            right = gradient @ self.x.T
        else:
            right = row_products(gradient.float(), self._single).double()
        inner = torch.zeros_like(right)
        for row, (weights, condition) in enumerate(zip(curvature, conditions.tolist(), strict=True)):
            rows = weights.nonzero()[:, 0]
            matrix = self._products_of(rows, condition > _ROUNDED)
            if condition > _SINGLE:
                matrix = matrix.double()
            matrix.diagonal().add_(1.0 / weights[rows])
            factor = torch.linalg.cholesky(matrix)
            side = right[row, rows, None].to(matrix.dtype)
            inner[row, rows] = torch.cholesky_solve(side, factor)[:, 0].double()
        return inner @ self.x - gradient  # the difference is small: in float32 nothing would be left of it

    def _products_of(self, rows: torch.Tensor, exact: bool) -> torch.Tensor:
        """X X^T of some rows, in float32 unless it has to be exact."""
        if exact or len(self.x) > _GRAM_ROWS:
            return _gram((self.x if exact else self._single)[rows])
        if self._products is None:
            self._products = _gram(self._single)
        return self._products.index_select(0, rows).index_select(1, rows)

    def _conjugate(
        self, gradient: torch.Tensor, curvature: torch.Tensor, patience: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Preconditioned conjugate gradients, until the residual is a small part of the gradient.

        Returns:
            (P, D) float64 directions, and (P,) whether each is good enough; patience may have ended.
        """
        axes, turned, across = self._principal()
        a = curvature.float()
        b = -gradient.float() @ axes
        diagonal = 1.0 + torch.cat([row_products(a, part.square()) for part in across.split(_PIECE)], dim=1)
        solution, residual = torch.zeros_like(b), b
        conditioned = residual / diagonal
        way = conditioned
        power = (residual * conditioned).sum(1, keepdim=True)
        enough = _PRECISION * b.norm(dim=1)
        solved = torch.zeros_like(enough, dtype=torch.bool)
        for product in range(_MOST_PRODUCTS):
            bent = way + row_products(row_products(way, turned).mul_(a), across)
            length = power / (way * bent).sum(1, keepdim=True).clamp_min(1e-30)
            solution = solution + length * way
            residual = residual - length * bent
            solved = residual.norm(dim=1) <= enough
            if (solved | (patience <= product)).all():
                break
            conditioned = residual / diagonal
            last, power = power, (residual * conditioned).sum(1, keepdim=True)
            way = conditioned + power / last.clamp_min(1e-30) * way
        return (solution @ axes.T).double(), solved

    def _principal(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Axes (D, R), X in them (N, R), and the same transposed; float32. A gradient lies in X's span and w's."""
        if self._turned is None:
            x = self._single
            if len(x) >= x.shape[1]:
                axes = torch.linalg.eigh(_gram(x.T.contiguous())).eigenvectors
            else:
                axes = torch.linalg.qr(x.T @ torch.linalg.eigh(_gram(x)).eigenvectors.flip(1)).Q
            turned = row_products(x, axes.T.contiguous())
            self._turned = axes, turned, turned.T.contiguous()
        return self._turned


def _gram(x: torch.Tensor) -> torch.Tensor:
    """X X^T; what mirrors is computed once."""
    out = x.new_empty(len(x), len(x))
    for first in range(0, len(x), _ROWS):
        last = first + _ROWS
        out[first:last, :last] = row_products(x[first:last], x[:last])
        out[:first, first:last] = out[first:last, :first].T
    return out
