// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/figures"
)

func newDoctor() *cobra.Command {
	var asJSON bool
	var specs backendSpecs
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say which backends work here, and what mends the rest",
		Long: `Say which backends this build has, which of them work on this machine, and the command
that mends what is missing. Then where GPUs, NICs and NVMe drives are plugged in, which of
their links are slower than they could be, and which NIC and drive are near to which GPU.

` + specHelp,
		Example: `  sluice doctor
  sluice doctor --backend tcp:listen=:7000,certificate=c.pem,key=k.pem,authority=ca.pem`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkDoctor(specs); err != nil {
				return err
			}
			var s machine.Source
			for _, b := range byname.All() {
				one := machine.Backend{Name: b.Name, Built: isBuilt(b)}
				if spec := specs.of(b.Name); one.Built {
					one.Open = func() error {
						opened, err := spec.openOne(1)
						switch {
						case err == nil:
							return opened.Close()
						case errors.Is(err, driver.ErrUnavailable):
							return err
						}
						return errors.New(oneLine(err))
					}
				}
				s.Backends = append(s.Backends, one)
			}
			s.Known = slices.Concat(tcpChecks(specs.of("tcp")), posixChecks())
			if withCgo {
				s.Known = slices.Concat(s.Known, ucxChecks(specs.of("ucx")),
					rdmaChecks(specs.of("rdma")), gdsChecks(specs.of("gds")))
			}
			devices := machine.ExamineDevices("/sys", func() (nvml.Findings, error) {
				return nvml.Examine(nvml.Library)
			})
			s.Known = slices.Concat(s.Known, cgoChecks())
			r := machine.Examine(s)
			var err error
			if asJSON {
				err = printJSON(c.OutOrStdout(), diagnosis{r, devices})
			} else {
				err = printReport(c.OutOrStdout(), &r, &devices)
			}
			return errors.Join(err, specs.missing(&r))
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().Var(&specs, "backend", "try a backend with these options; as often as there are")
	return c
}

// oneLine returns the text of an error as one line, for a table.
func oneLine(err error) string { return strings.ReplaceAll(sentence(err), "\n", "; ") }

// missing returns an error if a backend that the command line names does not work here.
func (l backendSpecs) missing(r *machine.Report) error {
	for _, b := range r.Backends {
		if b.State == machine.Missing && slices.ContainsFunc(l, func(s backendSpec) bool {
			return s.name == b.Name
		}) {
			return fmt.Errorf("backend %s does not work here: the reason stands above", b.Name)
		}
	}
	return nil
}

// checkDoctor returns an error if an option would have no effect.
func checkDoctor(specs backendSpecs) error {
	for i, spec := range specs {
		if specs[:i].of(spec.name).given {
			return usagef("--backend %s: there are two of %s: want one", spec.text, spec.name)
		}
		for _, b := range byname.All() {
			if b.Name == spec.name && !isBuilt(b) {
				return usagef("--backend %s: not in this build: build with cgo", spec.text)
			}
		}
		if spec.name == auto {
			return usagef("--backend %s: doctor tries all: name the one that has options", auto)
		}
	}
	return nil
}

// cgoChecks returns a check that names the backends which a build without cgo lacks, and how to get
// them. It returns none if this build has all.
func cgoChecks() []machine.Check {
	c := machine.Check{
		Name: "cgo", State: machine.NotBuilt, Found: "not in this build: needs cgo",
		Why: "these backends call C libraries",
		Fix: "CGO_ENABLED=1 go build -o sluice ./cmd/sluice   # with a C compiler: apt-get " +
			"install gcc",
	}
	for _, b := range byname.All() {
		if !isBuilt(b) {
			c.Backends = append(c.Backends, b.Name)
		}
	}
	if len(c.Backends) == 0 {
		return nil
	}
	return []machine.Check{c}
}

// machineLine describes the machine in one line.
func machineLine(m *machine.Machine) string {
	return fmt.Sprintf("%s, %d CPUs, %d NUMA node(s), %s of memory (%s available), kernel %s",
		m.CPU, m.CPUs, m.Nodes, figures.RoundSize(m.MemoryTotal), figures.RoundSize(m.MemoryFree),
		m.Kernel)
}

// diagnosis is what doctor prints as JSON.
type diagnosis struct {
	machine.Report
	Devices machine.Devices `json:"devices"`
}

func printReport(w io.Writer, r *machine.Report, devices *machine.Devices) error {
	var text bytes.Buffer
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s\n\n", machineLine(&r.Machine))
	fmt.Fprintln(t, "BACKEND\tSTATE\tWHY")
	for _, b := range r.Backends {
		fmt.Fprintf(t, "%s\t%s\t%s\n", b.Name, readiness(b.State), strings.Join(b.Notes, "; "))
	}
	fmt.Fprintln(t, "\nCHECK\tSTATE\tFOUND")
	for _, c := range r.Checks {
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.Name, c.State, c.Found)
	}
	printFixes(t, r.Checks)
	_ = t.Flush() // a buffer takes all
	fmt.Fprintln(&text)
	devices.Print(&text)
	if _, err := w.Write(text.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// readiness returns the word for a backend's state in the report.
func readiness(s machine.State) string {
	if s == machine.OK {
		return "ready"
	}
	return string(s)
}

// printFixes prints the commands that mend what is missing. It prints each once, though several
// checks may name it.
func printFixes(w io.Writer, checks []machine.Check) {
	title := "\nTo mend:"
	printed := map[string]bool{}
	for _, c := range checks {
		if c.Fix == "" || printed[c.Fix] {
			continue
		}
		printed[c.Fix] = true
		if title != "" {
			fmt.Fprintln(w, title)
			title = ""
		}
		fmt.Fprintf(w, "  %s (%s): %s\n      %s\n", c.Name, strings.Join(c.Backends, ", "), c.Why,
			c.Fix)
	}
}
