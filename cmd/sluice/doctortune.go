// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
)

// copyVariable says how the processes of the tool copy: what a Config calls HostCopy. Child
// processes inherit it.
const copyVariable = "SLUICE_HOST_COPY"

const tuneLong = `Each process measures in some milliseconds how to copy long runs of large batches within
host memory, when the first comes. --tune measures for some seconds instead, with 256 MiB, best
on an idle machine, and writes the result to a file. ` + copyVariable + ` has this tool copy so:
the path of that file, with a slash, or the name of a variant that sluice bench copy lists. A
program says it in HostCopy of the Config of mem, shm or ucx. A file of another machine is
refused.`

// configureCopy makes the choice of this process. Its error is no usage error: no flag is wrong.
func configureCopy() error {
	if err := copy.Configure(os.Getenv(copyVariable)); err != nil {
		return fmt.Errorf("%s: %s", copyVariable, strings.TrimSuffix(err.Error(),
			": "+driver.ErrBounds.Error()))
	}
	return nil
}

// copyChecks says how this machine copies within host memory: as configured, or by measuring it.
func copyChecks() []machine.Check {
	c := machine.Check{Name: "host-copy", State: machine.OK,
		Why: "long runs of large batches are copied so", Backends: []string{"mem", "shm", "ucx"}}
	if err := configureCopy(); err != nil {
		c.State, c.Found = machine.Missing, err.Error()
		c.Why = "commands that open backends refuse to begin"
		c.Fix = "sluice doctor --tune FILE and " + copyVariable + "=./FILE, or unset " +
			copyVariable
	} else {
		c.Found = copy.Chosen().Why
	}
	return []machine.Check{c}
}

// busyNote warns of figures that others disturb, by the content of /proc/loadavg.
func busyNote(load string, cpus int) string {
	first, _, _ := strings.Cut(load, " ")
	if n, err := strconv.ParseFloat(first, 64); err == nil && n > float64(cpus)/2 {
		return fmt.Sprintf("others use this machine (load %s on %d CPUs), and caches with it: "+
			"measure again when it is idle", first, cpus)
	}
	return ""
}

// runTune is doctor --tune.
func runTune(c *cobra.Command, name string, asJSON bool) (err error) {
	if err := refuse(c, "--tune measures this machine and reports nothing else: it takes no --%s",
		beside(c, "tune", "json")...); err != nil {
		return err
	}
	path, err := filepath.Abs(name)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return usagef("--tune: %w", err)
	}
	defer os.Remove(file.Name())            // gone by then if all is well
	load, _ := os.ReadFile("/proc/loadavg") // a kernel that does not tell: no note
	if note := busyNote(string(load), runtime.NumCPU()); note != "" {
		fmt.Fprintf(c.ErrOrStderr(), "%s: %s\n", c.CommandPath(), note)
	}
	var text copy.Tuned
	tune := func() error {
		choice, err := copy.Tune(c.Context())
		if err != nil {
			return err
		}
		text = choice.File()
		return printJSON(file, text)
	}
	if err = errors.Join(tune(), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if asJSON {
		return printJSON(c.OutOrStdout(), text)
	}
	_, err = fmt.Fprintf(c.OutOrStdout(), "host-copy: %s\n%s has it: %s=%s, or HostCopy of a "+
		"Config\n", text.Why, name, copyVariable, path)
	return err
}
