// SPDX-License-Identifier: Apache-2.0

// Package cufile hands reads and writes of files to libcufile, which Load opens at run time, after
// libcuda; with CGO_ENABLED=0 there is none. calls.h has it in our own words. A Mover has threads
// (worker.c), whose requests end in the ring of package cuda.
package cufile
