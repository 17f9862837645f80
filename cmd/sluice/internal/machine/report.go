// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
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

// NotBuilt is the state of a backend that this build does not have, and of the check that says why.
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
	Name  string   `json:"name"`
	State State    `json:"state"`
	Notes []string `json:"notes"` // the checks that are not ok
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

// Examine looks at the machine. It changes nothing and needs no privilege.
func Examine(s Source) Report {
	s.memory = hostmem.LimitsAt(s.path("/"))
	r := Report{Machine: s.machine(), Checks: openChecks(&s)}
	r.Checks = s.known(append(r.Checks, s.memlock(), s.numa(), s.descriptors(), s.mappings(),
		s.socketBuffers(), s.hugePages(), s.transparentPages(), s.sharedTransparentPages(),
		s.ptrace(), s.copies(), s.memfd(), s.kernel()))
	for _, b := range s.Backends {
		r.Backends = append(r.Backends, b.verdict(r.Checks))
	}
	r.Checks = slices.DeleteFunc(r.Checks, func(c Check) bool { return !s.concerns(&c) })
	return r
}

// known adds what the caller found out. That a backend does not open is not said twice.
func (s *Source) known(checks []Check) []Check {
	checks = append(checks, s.Known...)
	return slices.DeleteFunc(checks, func(c Check) bool {
		return strings.HasPrefix(c.Name, "open-") &&
			slices.ContainsFunc(s.Known, func(k Check) bool {
				return k.State == Missing && k.Found == c.Found
			})
	})
}

// openChecks tries the backends of this build; only failures are worth a line.
func openChecks(s *Source) []Check {
	var checks []Check
	for _, b := range s.Backends {
		if b.Open == nil {
			continue
		}
		if err := b.Open(); err != nil {
			c := Check{Name: "open-" + b.Name, State: Missing, Found: err.Error(),
				Why: "without it the backend does not open", Backends: []string{b.Name}}
			var missing *driver.UnavailableError
			if errors.As(err, &missing) {
				c.Found, c.Fix = missing.Reason, missing.Fix
			}
			checks = append(checks, c)
		}
	}
	return checks
}

func (b *Backend) verdict(checks []Check) Verdict {
	v := Verdict{Name: b.Name, State: OK, Notes: []string{}}
	for _, c := range checks {
		switch {
		case !slices.Contains(c.Backends, b.Name) || c.State == OK || c.State == Note:
			continue
		case c.State == NotBuilt:
			return Verdict{Name: b.Name, State: NotBuilt, Notes: []string{c.Found}}
		}
		v.Notes = append(v.Notes, c.Name+": "+c.Found)
		if c.State == Missing || v.State == OK {
			v.State = c.State
		}
	}
	return v
}

// concerns reports whether a check is about a backend of this build, or about the build.
func (s *Source) concerns(c *Check) bool {
	return c.State == NotBuilt || slices.ContainsFunc(s.Backends, func(b Backend) bool {
		return b.Built && slices.Contains(c.Backends, b.Name)
	})
}

func backendsOf(names string) []string { return strings.Fields(names) }
