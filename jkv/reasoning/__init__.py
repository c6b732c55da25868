"""What a row's text contains (steps, sentences, formulas), found on the host while the device decodes."""
