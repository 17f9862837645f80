// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/plot"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
)

// plotPython draws --plot.
const plotPython = "python3"

// checkPlot finds, before anything is measured, what would fail after it.
func (f *benchFlags) checkPlot(c *cobra.Command) error {
	if !c.Flags().Changed("plot") {
		return nil
	}
	if !f.sweep {
		return usagef("--plot draws sizes: it takes --sweep")
	}
	if err := plot.Named(f.plot); err != nil {
		return &usageError{fmt.Errorf("--plot: %w", err)}
	}
	if err := writable(f.plot); err != nil {
		return &usageError{fmt.Errorf("--plot: %w", err)}
	}
	return plot.Check(c.Context(), plotPython)
}

// writable reports why a file cannot be written. It changes no file and leaves none behind. It
// opens no pipe, whose reader would take that for the end; a link to nothing may yet lead to a
// file.
func writable(path string) error {
	if s, err := os.Stat(path); err == nil && !s.Mode().IsRegular() && !s.IsDir() {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err == nil {
		return errors.Join(f.Close(), os.Remove(path))
	}
	if errors.Is(err, os.ErrExist) {
		switch f, err = os.OpenFile(path, os.O_WRONLY, 0); {
		case err == nil:
			err = f.Close()
		case errors.Is(err, os.ErrNotExist):
			err = nil
		}
	}
	return err
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
