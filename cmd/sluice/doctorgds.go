// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
)

const gdsName = "gds"

// experimentalChecks names the backends that real devices have hardly met.
func experimentalChecks() []machine.Check {
	return []machine.Check{{
		Name: "experimental", State: machine.Note, Backends: []string{"cuda", gdsName},
		Found: "cuda has met one H100, gds there compat mode alone",
		Why:   "all else has run over software stand-ins: check what they move",
	}}
}

// gdsChecks says what cuFile says of itself: its version, its limits, and whether bytes bounce
// through the host. Which of cuFile and the engine's own chain is faster takes a measurement, which
// the check names.
func gdsChecks(cfg gds.Config) []machine.Check {
	c := machine.Check{Name: "cufile", State: machine.OK, Backends: []string{gdsName},
		Why: "sluice bench --lane gpufile measures it beside the staged route on this machine"}
	facts, err := gds.Examine(cfg)
	var missing *driver.UnavailableError
	switch {
	case errors.As(err, &missing):
		c.State, c.Found, c.Fix, c.Why = machine.Missing, missing.Reason, missing.Fix,
			"device memory and files are moved through host memory"
	case err != nil:
		return nil // to open the backend says it, too
	default:
		c.Found = facts.String()
		if facts.Compat {
			c.State, c.Fix = machine.Limited, "modprobe nvidia-fs, for disks and filesystems "+
				"that it serves"
		}
	}
	return []machine.Check{c}
}
