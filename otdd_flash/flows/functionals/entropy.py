"""The internal energy: entropy, which noise takes the place of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entropy:
    """F(rho) = int rho log rho, which spreads particles.

    Particles have no density, so it has neither value nor gradient here. Its flow is diffusion:
    with weight w, a step of size tau adds sqrt(2 w tau) N(0, I) to every particle (Langevin;
    Jordan, Kinderlehrer & Otto 1998, The variational formulation of the Fokker-Planck equation).
    """
