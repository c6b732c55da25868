"""Analysis of a row's text (thoughts, sentences, formulas), on the host while the device decodes."""
