// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/plot"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
)

// plotPython draws --plot.
const plotPython = "python3"

// checkPlot finds, before anything is measured, what would fail after it.
func (f *benchFlags) checkPlot(ctx context.Context) error {
	if f.plot == "" {
		return nil
	}
	if !f.sweep {
		return usagef("--plot draws sizes: it takes --sweep")
	}
	if err := plot.Named(f.plot); err != nil {
		return &usageError{fmt.Errorf("--plot: %w", err)}
	}
	dir := filepath.Dir(f.plot)
	if info, err := os.Stat(dir); err != nil {
		return &usageError{fmt.Errorf("--plot: %w", err)}
	} else if !info.IsDir() {
		return usagef("--plot %s: %s is no directory", f.plot, dir)
	}
	return plot.Check(ctx, plotPython)
}

// draw draws --plot.
func (f *benchFlags) draw(ctx context.Context, results []bench.Result) error {
	if f.plot == "" {
		return nil
	}
	m := machine.Examine(machine.Source{}).Machine
	title := fmt.Sprintf("sluice %s bench --backend %s --sweep, %s, %d CPUs, kernel %s",
		readVersion().Version, f.backend, m.CPU, m.CPUs, m.Kernel)
	return plot.Draw(ctx, plotPython, plot.Sweep{Title: title, Results: results}, f.plot)
}
