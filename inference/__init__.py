"""The bundled decoder and what it proves: target, taps, sampling, verification, measurement,
export."""
