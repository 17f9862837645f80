// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// State is how good a thing is for the backends that it concerns.
type State string

// The states, from good to bad.
const (
	OK      State = "ok"
	Limited State = "limited" // works, slower or smaller than it could
	Missing State = "missing" // the backends concerned cannot work
	Note    State = "note"    // a fact without a judgement
)

// NotBuilt is the state of a backend that this build does not have, whatever the
// machine offers it, and of the check that says why.
const NotBuilt State = "not built"

// Check is one finding.
type Check struct {
	Name     string   `json:"name"`
	State    State    `json:"state"`
	Found    string   `json:"found"`
	Why      string   `json:"why"`      // what it means for the backends
	Fix      string   `json:"fix"`      // the command that mends it; empty when all is well
	Backends []string `json:"backends"` // that it concerns
}

// Verdict is the sum of a backend's checks.
type Verdict struct {
	Name    string   `json:"name"`
	Build   bool     `json:"build"`   // this build has it
	State   State    `json:"state"`   // whether it can be used: Machine, or NotBuilt
	Machine State    `json:"machine"` // how ready the machine is for it
	Notes   []string `json:"notes"`   // the checks that are not ok
}

// Machine says where this is.
type Machine struct {
	Kernel      string `json:"kernel"`
	Arch        string `json:"arch"`
	CPU         string `json:"cpu"`
	CPUs        int    `json:"cpus"`
	Nodes       int    `json:"numa_nodes"`
	MemoryTotal uint64 `json:"memory_total"` // of the machine or the cgroup, whichever has less
	MemoryFree  uint64 `json:"memory_available"`
}

// Report is everything that Examine finds.
type Report struct {
	Machine  Machine   `json:"machine"`
	Backends []Verdict `json:"backends"`
	Checks   []Check   `json:"checks"`
}

// backendNames lists the backends that checks may concern, in the order of the report.
var backendNames = []string{"mem", "shm", "tcp", "posix", "ucx", "rdma", "gds", "cuda"}

// Examine looks at the machine. It changes nothing and needs no privilege.
func Examine(s Source) Report {
	s.memory = hostmem.LimitsAt(s.path("/"))
	r := Report{Machine: s.machine()}
	for _, look := range []func(*Source) []Check{
		openChecks, memoryChecks, pageChecks, processChecks, fileChecks, networkChecks,
		libraryChecks,
	} {
		r.Checks = append(r.Checks, look(&s)...)
	}
	r.Checks = s.known(r.Checks)
	for _, name := range s.names() {
		r.Backends = append(r.Backends, s.verdict(name, r.Checks))
	}
	return r
}

// known puts what the caller found out in the place of checks of the same name, and
// the rest behind. That a backend does not open is not said twice.
func (s *Source) known(checks []Check) []Check {
	for _, c := range s.Known {
		i := slices.IndexFunc(checks, func(other Check) bool { return other.Name == c.Name })
		if i < 0 {
			checks = append(checks, c)
		} else {
			checks[i] = c
		}
	}
	return slices.DeleteFunc(checks, func(c Check) bool {
		return strings.HasPrefix(c.Name, "open-") &&
			slices.ContainsFunc(s.Known, func(k Check) bool {
				return k.State == Missing && k.Found == c.Found
			})
	})
}

// names lists the backends: first those of this build.
func (s *Source) names() []string {
	var built, others []string
	for _, name := range backendNames {
		if _, ok := s.Backends[name]; ok {
			built = append(built, name)
		} else {
			others = append(others, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Backends)) {
		if !slices.Contains(built, name) {
			built = append(built, name)
		}
	}
	return append(built, others...)
}

// openChecks tries the backends of this build; only failures are worth a line.
func openChecks(s *Source) []Check {
	var checks []Check
	for _, name := range slices.Sorted(maps.Keys(s.Backends)) {
		open := s.Backends[name]
		if open == nil {
			continue
		}
		if err := open(); err != nil {
			c := Check{Name: "open-" + name, State: Missing, Found: err.Error(),
				Why: "the backend says so itself when it is opened", Backends: []string{name}}
			var missing *driver.UnavailableError
			if errors.As(err, &missing) {
				c.Found, c.Fix = missing.Reason, missing.Fix
			}
			checks = append(checks, c)
		}
	}
	return checks
}

func (s *Source) verdict(name string, checks []Check) Verdict {
	v := Verdict{Name: name, Machine: OK, Notes: []string{}}
	for _, c := range checks {
		if !slices.Contains(c.Backends, name) || c.State == OK || c.State == Note {
			continue
		}
		if c.State == NotBuilt { // no fault of the machine
			v.Notes = append([]string{c.Found}, v.Notes...)
			continue
		}
		v.Notes = append(v.Notes, c.Name+": "+c.Found)
		if c.State == Missing || v.Machine == OK {
			v.Machine = c.State
		}
	}
	v.State = v.Machine
	if _, v.Build = s.Backends[name]; !v.Build {
		v.State = NotBuilt
	}
	return v
}

// Concerns reports whether a check is about a backend of this build, or about the build.
func (r *Report) Concerns(c *Check) bool {
	return c.State == NotBuilt || slices.ContainsFunc(r.Backends, func(v Verdict) bool {
		return v.Build && slices.Contains(c.Backends, v.Name)
	})
}

func backendsOf(names string) []string { return strings.Fields(names) }
