// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
)

// ucxName is the backend that ucxFlags are for.
const ucxName = "ucx"

// ucxFlags are what a command line says about the ucx backend, and about nothing else.
type ucxFlags struct {
	transports string
	devices    string // by networkFlags
	workers    int
}

// workersMax bounds --workers: a thread each, for peers of this host and for others.
const workersMax = 16

func (u *ucxFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&u.transports, "transports", "", "of backend ucx alone: as UCX_TLS, such as tcp "+
		"or posix,sysv,cma,self; without it all that there are")
	s.IntVar(&u.workers, "workers", 0, "of backend ucx alone: UCX workers, a thread each; 0: "+
		"what the backend thinks right")
}

// given names the flags that were set.
func (u *ucxFlags) given() []string {
	var names []string
	if u.transports != "" {
		names = append(names, "--transports")
	}
	if u.devices != "" {
		names = append(names, "--devices")
	}
	if u.workers != 0 {
		names = append(names, "--workers")
	}
	return names
}

// check refuses the flags for a backend that they do not concern: what is ignored in
// silence would be believed.
func (u *ucxFlags) check(backend string) error {
	if u.workers < 0 || u.workers > workersMax {
		return usagef("--workers %d: want 1 to %d, or 0 for what the backend thinks right",
			u.workers, workersMax)
	}
	if names := u.given(); len(names) > 0 && backend != ucxName {
		return usagef("%s is of backend %s alone: say --backend %s, not %q", names[0], ucxName,
			ucxName, backend)
	}
	return nil
}

// config is the backend's.
func (u *ucxFlags) config() ucx.Config {
	return ucx.Config{Transports: u.transports, Devices: u.devices, Workers: u.workers}
}

// examine finds, before anything is started, what would fail or be ignored in each
// process: no UCX, and names that this machine has not.
func (u *ucxFlags) examine(backend string) error {
	switch {
	case backend == ucxName && len(u.given()) == 0:
		_, err := ucx.Version("")
		return err
	case backend != ucxName:
		return nil
	}
	found, err := ucx.Examine(u.config())
	switch {
	case errors.Is(err, driver.ErrUnavailable):
		return err
	case err != nil:
		return &usageError{fmt.Errorf("--transports: %w", err)}
	case len(found.Absent) > 0:
		return u.absent(found.Absent)
	}
	return nil
}

// absent says what there is in place of what there is not.
func (u *ucxFlags) absent(names []string) error {
	all, err := ucx.Examine(ucx.Config{})
	if err != nil {
		return err
	}
	return &driver.UnavailableError{
		Backend: ucxName,
		Reason: fmt.Sprintf("this machine has no %s: there are transports %s, network devices %s",
			strings.Join(names, ", "),
			strings.Join(slices.Concat(all.Near, all.Far), ", "), strings.Join(all.Devices, ", ")),
		Fix: "choose of these: `ucx_info -d` describes them",
	}
}

// args are the flags once more, for a child process.
func (u *ucxFlags) args() []string {
	var list []string
	if u.transports != "" {
		list = append(list, "--transports="+u.transports)
	}
	return number(list, "workers", u.workers)
}
