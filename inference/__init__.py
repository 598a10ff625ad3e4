"""The bundled decoder and its evidence: target, taps, sampling, verification, measurement,
export."""
