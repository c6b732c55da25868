"""The papers and other libraries, measured beside this one; kernels and steps on a device."""
