// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/options"
)

// ucxChecks says what UCX has on this machine, by trying it: which files are there
// says little.
func ucxChecks(spec backendSpec, environment []string) []machine.Check {
	var cfg ucx.Config
	if options.Set(&cfg, spec.words) != nil {
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
		ucxNear(&cfg, &found), ucxCMA(&cfg, &found), ucxFar(&cfg, &found),
		ucxEnvironment(&found, environment)}
	if len(found.Absent) > 0 {
		checks = append(checks, ucxCheck("ucx-names", machine.Missing, "not on this machine: "+
			strings.Join(found.Absent, ", "),
			"the options transports and devices name what UCX does not find",
			"choose of those above: `ucx_info -d` describes them"))
	}
	return append(checks, ucxLeftovers("/dev/shm", time.Now())...)
}

// ucxLeftovers finds files of processes that were killed just when they opened UCX:
// all others have taken the names of theirs away within milliseconds.
func ucxLeftovers(dir string, now time.Time) []machine.Check {
	const pattern = "ucx_shm_posix_*"
	files, _ := filepath.Glob(filepath.Join(dir, pattern)) // the only error is a bad pattern
	var count, bytes uint64
	for _, file := range files {
		if info, err := os.Stat(file); err == nil && now.Sub(info.ModTime()) > time.Minute {
			count++
			bytes += uint64(info.Size())
		}
	}
	if count == 0 {
		return nil
	}
	return []machine.Check{ucxCheck("ucx-leftovers", machine.Note,
		fmt.Sprintf("%d file(s) in %s, %s", count, dir, figures.RoundSize(bytes)),
		"processes were killed while they opened UCX, and their memory stays until it is removed",
		fmt.Sprintf("find %s -maxdepth 1 -name '%s' -mmin +1 -delete", dir, pattern))}
}

func ucxCheck(name string, state machine.State, found, why, fix string) machine.Check {
	return machine.Check{Name: name, State: state, Found: found, Why: why, Fix: fix,
		Backends: []string{"ucx"}}
}

func ucxNear(cfg *ucx.Config, f *ucx.Findings) machine.Check {
	const name, why = "ucx-near", "to peers of this host, in the same namespaces and of " +
		"the same user"
	switch {
	case len(f.Near) > 0:
		return ucxCheck(name, machine.OK, strings.Join(f.Near, ", "), why, "")
	case cfg.Transports != "":
		return ucxCheck(name, machine.Note, "none, by the option transports", why, "")
	}
	return ucxCheck(name, machine.Limited, "none", "peers of this host are reached over the "+
		"network: two copies and the kernel", "")
}

// ucxCMA is whether the kernel copies between processes, in UCX's own judgement.
func ucxCMA(cfg *ucx.Config, f *ucx.Findings) machine.Check {
	const name = "ucx-cma"
	switch {
	case slices.Contains(f.Near, "cma"):
		return ucxCheck(name, machine.OK, "works", "the kernel copies memory that peers "+
			"cannot map, once", "")
	case cfg.Transports != "":
		return ucxCheck(name, machine.Note, "not used, by the option transports",
			"memory that peers cannot map is copied twice", "")
	}
	return ucxCheck(name, machine.Limited, "refused", "memory that peers cannot map is copied "+
		"twice, through UCX's buffers",
		"sysctl -w kernel.yama.ptrace_scope=0   # containers: docker run --cap-add SYS_PTRACE")
}

func ucxFar(cfg *ucx.Config, f *ucx.Findings) machine.Check {
	const name, why = "ucx-far", "to peers on other hosts, or apart by namespaces or user"
	devices := slices.DeleteFunc(slices.Clone(f.Devices), func(d string) bool { return d == "lo" })
	switch {
	case len(f.Far) == 0 && cfg.Transports != "":
		return ucxCheck(name, machine.Note, "none, by the option transports", why, "")
	case len(f.Far) == 0 || len(f.Devices) == 0:
		return ucxCheck(name, machine.Limited, "none", "no peer on another host can be reached", "")
	case len(devices) == 0 && cfg.Devices == "":
		return ucxCheck(name, machine.Limited, strings.Join(f.Far, ", ")+" over lo alone",
			"no peer on another host can be reached", "")
	}
	return ucxCheck(name, machine.OK, fmt.Sprintf("%s over %s", strings.Join(f.Far, ", "),
		strings.Join(f.Devices, ", ")), why, "")
}

// ucxEnvironment names what of the user's UCX reads. The values are the user's affair.
func ucxEnvironment(f *ucx.Findings, environment []string) machine.Check {
	var read, idle []string
	for _, entry := range environment {
		name, _, _ := strings.Cut(entry, "=")
		setting, ok := strings.CutPrefix(name, "UCX_")
		switch {
		case !ok:
		case slices.Contains(f.Sets, setting):
			idle = append(idle, name)
		default:
			read = append(read, name)
		}
	}
	slices.Sort(read)
	slices.Sort(idle)
	var words []string
	if len(read) > 0 {
		words = append(words, "UCX reads "+strings.Join(read, ", "))
	}
	if len(idle) > 0 {
		words = append(words, "without effect, because the backend sets these itself: "+
			strings.Join(idle, ", "))
	}
	if len(words) == 0 {
		words = []string{"no UCX_* variable is set"}
	}
	return ucxCheck("ucx-environment", machine.Note, strings.Join(words, "; "),
		"variables change what UCX does in every program; options and Config win", "")
}
