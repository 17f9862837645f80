// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/layout"
)

// reshapeWorkload is the workload between two groups of ranks.
const reshapeWorkload = "reshape"

// reshapeTokens is --tokens of it, unless said otherwise.
const reshapeTokens = 8192

// reshapeFlags are of that workload alone.
type reshapeFlags struct {
	groups groupsFlags
	scale  int
}

func (f *reshapeFlags) register(c *cobra.Command) {
	f.groups.register(c, "of --workload reshape alone: ")
	c.Flags().IntVar(&f.scale, "scale", 0, "of --workload reshape alone: keep one layer in that "+
		"many; 0: as many as fit half of the memory")
}

// check refuses what concerns other workloads alone, or is of this one alone.
func (f *benchFlags) checkReshape(c *cobra.Command) error {
	if f.workload.name != reshapeWorkload {
		return refuse(c, "--%s is of --workload "+reshapeWorkload+" alone", "prefill", "decode",
			"model", "scale")
	}
	if err := refuse(c, "--workload "+reshapeWorkload+" takes no --%s: the groups say it", "op",
		"block-tokens", "operation-bytes", "spread"); err != nil {
		return err
	}
	if !c.Flags().Changed("tokens") {
		f.workload.tokens = reshapeTokens
	}
	if n := f.workload.tokens; n < 1 || n > 1<<24 {
		return usagef("--tokens %d: want 1 to %d", n, 1<<24)
	}
	if n := f.reshape.scale; n < 0 || n > layout.LayersMax {
		return usagef("--scale %d: want 1 to %d, or 0", n, layout.LayersMax)
	}
	return nil
}

// runReshape measures the hand-over between two groups over one backend.
func runReshape(c *cobra.Command, f *benchFlags, write printer) error {
	if _, err := f.shapes(); err != nil { // what concerns any shape
		return err
	}
	spec, from, to, err := f.reshape.groups.parse()
	if err != nil {
		return err
	}
	if err := f.settle(); err != nil {
		return err
	}
	reach := driver.SameHost // as between processes
	if f.inProcess() {
		reach = driver.InProcess
	}
	r := bench.Reshaping{Spec: spec, From: from, To: to, Tokens: f.workload.tokens,
		Threads: f.threads, Memory: bench.Memory(f.memory), Only: only(f.backend),
		Open: func() ([]driver.Backend, error) {
			return openBackends(f.backend, reach, f.openOptions())
		}}
	err = r.Scale(f.reshape.scale, hostmem.Limits().Available)
	if errors.Is(err, layout.ErrGeometry) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	total := f.time()
	bar := newProgress(c.ErrOrStderr(), 1000, "bench reshape")
	defer bar.clear()
	o := bench.Options{Time: total, Rounds: f.rounds,
		Progress: func(d time.Duration) { bar.set(min(int64(1000*d/total), 999)) }}
	m := startMeasuring(c, f.about(1))
	res, err := bench.Reshape(c.Context(), r, o)
	if err != nil {
		return err
	}
	return m.print(write, []bench.Result{res}, nil)
}
