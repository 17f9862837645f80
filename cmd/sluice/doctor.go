// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
)

func newDoctor() *cobra.Command {
	var all, asJSON bool
	var root, tune string
	var n networkFlags
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine offers each backend, and what mends the rest",
		Long: `Say which backends this build has, what this machine offers each, and the command
that mends what is missing. A build without cgo has no ucx, rdma, gds and cuda: they are
listed with what the machine offers them, and --all shows the checks that only they need.
Then where GPUs, NICs and NVMe drives are plugged in, which of their links are slower than
they could be, and which NIC and drive are near to which GPU.

` + tuneLong,
		Example: `  sluice doctor
  sluice doctor --tune copy.json
  ` + copyVariable + `=./copy.json sluice bench`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if c.Flags().Changed("tune") {
				return runTune(c, tune, asJSON)
			}
			if err := checkDoctor(c, &n); err != nil {
				return err
			}
			s := machine.Source{Root: root,
				LibraryDirs: filepath.SplitList(os.Getenv("LD_LIBRARY_PATH"))}
			_, few := openFilesLimit()
			try := root == "" && !few
			s.Backends = builtBackends(try, &n)
			if try {
				s.Known = slices.Concat(tcpChecks(&n.tcp), posixChecks(), copyChecks())
			}
			if try && withCgo {
				s.Known = slices.Concat(s.Known, ucxChecks(&n.ucx, os.Environ()),
					rdmaChecks(&n.rdma), gdsChecks(gds.Config{}))
			}
			tree := examineDevices(root)
			s.Known = append(s.Known, slices.Concat(cgoChecks(), experimentalChecks(),
				deviceChecks(&tree))...)
			r := machine.Examine(s)
			if asJSON {
				return printJSON(c.OutOrStdout(), diagnosis{r, tree})
			}
			if err := printReport(c.OutOrStdout(), &r, all); err != nil {
				return err
			}
			return printDevices(c.OutOrStdout(), &tree)
		},
	}
	c.Flags().BoolVar(&all, "all", false, "also what concerns only backends that are not "+
		"in this build")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().StringVar(&tune, "tune", "", "measure for seconds how this machine copies host "+
		"memory, and write it to this file")
	n.register(c)
	c.Flags().StringVar(&root, "root", "", "look at the proc, sys and lib below this directory")
	_ = c.Flags().MarkHidden("root") // the only error is a flag that does not exist
	return c
}

func checkDoctor(c *cobra.Command, n *networkFlags) error {
	if c.Flags().Changed("root") {
		return refuse(c, "--root is a tree of files, and no backend is opened: it takes no --%s",
			beside(c, "root", "json", "all")...)
	}
	return n.settleDoctor()
}

// builtBackends lists what this build has; to try one is to open it here.
func builtBackends(try bool, n *networkFlags) map[string]func() error {
	built := map[string]func() error{}
	for _, m := range makers {
		if !m.built() {
			continue
		}
		built[m.name] = nil
		if try {
			built[m.name] = func() error {
				b, err := m.open(openOptions{threads: 1, ucx: n.ucx, tcp: n.tcp,
					rdma: n.rdma})
				if err != nil {
					return err
				}
				return b.Close()
			}
		}
	}
	return built
}

// cgoChecks says which backends are missing from a build without cgo, and how to get them.
func cgoChecks() []machine.Check {
	c := machine.Check{
		Name: "cgo", State: machine.NotBuilt, Found: "not in this build: needs cgo",
		Why: "these backends call C libraries",
		Fix: "CGO_ENABLED=1 go build -o sluice ./cmd/sluice   # with a C compiler: apt-get " +
			"install gcc",
	}
	for _, m := range makers {
		if !m.built() {
			c.Backends = append(c.Backends, m.name)
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
		m.CPU, m.CPUs, m.Nodes, bench.RoundSize(m.MemoryTotal), bench.RoundSize(m.MemoryFree),
		m.Kernel)
}

func printReport(w io.Writer, r *machine.Report, all bool) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s\n\n", machineLine(&r.Machine))
	fmt.Fprintln(t, "BACKEND\tIN THIS BUILD\tMACHINE\tWHY")
	for _, b := range r.Backends {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", b.Name, inBuild(b.Build), readiness(b.Machine),
			strings.Join(b.Notes, "; "))
	}
	checks := r.Checks
	if !all {
		checks = slices.DeleteFunc(slices.Clone(checks), func(c machine.Check) bool {
			return !r.Concerns(&c)
		})
	}
	fmt.Fprintln(t, "\nCHECK\tSTATE\tFOUND")
	for _, c := range checks {
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.Name, c.State, c.Found)
	}
	printFixes(t, checks)
	if hidden := len(r.Checks) - len(checks); hidden > 0 {
		fmt.Fprintf(t, "\n%d checks concern only backends that are not in this build: --all "+
			"shows them.\n", hidden)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func inBuild(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// readiness is a state as the machine's share in a backend: "ok" beside a backend
// that does not exist would be misread.
func readiness(s machine.State) string {
	if s == machine.OK {
		return "ready"
	}
	return string(s)
}

// printFixes prints each command once: two checks may find the same thing missing.
func printFixes(w io.Writer, checks []machine.Check) {
	title := "\nTo mend:"
	said := map[string]bool{}
	for _, c := range checks {
		if c.Fix == "" || said[c.Fix] {
			continue
		}
		said[c.Fix] = true
		if title != "" {
			fmt.Fprintln(w, title)
			title = ""
		}
		fmt.Fprintf(w, "  %s (%s): %s\n      %s\n", c.Name, strings.Join(c.Backends, ", "), c.Why,
			c.Fix)
	}
}
