// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
)

// ucxChecks says what UCX has on this machine, by trying it: which files are there
// says little.
func ucxChecks(spec backendSpec) []machine.Check {
	var cfg ucx.Config
	if byname.SetOptions(&cfg, spec.words) != nil {
		return nil // to open the backend says it, too
	}
	found, err := ucx.Examine(cfg)
	var missing *driver.UnavailableError
	switch {
	case errors.As(err, &missing):
		return []machine.Check{ucxCheck("libucp", machine.Missing, missing.Reason,
			"opened at run time", missing.Fix)}
	case err != nil:
		return nil // of the options; to open the backend says it, too
	}
	checks := []machine.Check{ucxCheck("libucp", machine.OK, "UCX "+found.Version+", "+
		found.Library, "opened at run time", ""),
		ucxTransports(&cfg, &found)}
	if len(found.Absent) > 0 {
		checks = append(checks, ucxCheck("ucx-names", machine.Missing, "not on this machine: "+
			strings.Join(found.Absent, ", "),
			"the options transports and devices name what UCX does not find",
			"choose of those above: `ucx_info -d` describes them"))
	}
	return checks
}

func ucxCheck(name string, state machine.State, found, why, fix string) machine.Check {
	return machine.Check{Name: name, State: state, Found: found, Why: why, Fix: fix,
		Backends: []string{"ucx"}}
}

func ucxTransports(cfg *ucx.Config, f *ucx.Findings) machine.Check {
	const name, why = "ucx-transports", "to peers on other hosts, and on this one where shm cannot"
	devices := slices.DeleteFunc(slices.Clone(f.Devices), func(d string) bool { return d == "lo" })
	switch {
	case len(f.Transports) == 0 || len(f.Devices) == 0:
		return ucxCheck(name, machine.Limited, "none", "no peer can be reached", "")
	case len(devices) == 0 && cfg.Devices == "":
		return ucxCheck(name, machine.Limited, strings.Join(f.Transports, ", ")+" over lo alone",
			"no peer on another host can be reached", "")
	}
	return ucxCheck(name, machine.OK, fmt.Sprintf("%s over %s", strings.Join(f.Transports, ", "),
		strings.Join(f.Devices, ", ")), why, "")
}
