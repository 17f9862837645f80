// SPDX-License-Identifier: Apache-2.0

// Package plot draws what was measured as a picture. The script that draws is part of the
// package; it needs an interpreter of Python with matplotlib.
package plot

import (
	"bytes"
	"context"
	_ "embed" // the script
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/sluicehq/sluice/bench"
)

//go:embed plot.py
var script string

// Sweep is one backend over several sizes. Draw takes it, or a report of package peers.
type Sweep struct {
	Title   string         `json:"title"`
	Results []bench.Result `json:"results"`
}

// Named refuses the name of a picture of a kind that Draw does not draw.
func Named(picture string) error {
	if !slices.Contains([]string{".svg", ".png"}, filepath.Ext(picture)) {
		return fmt.Errorf("picture %q: want a name that ends with .svg or .png", picture)
	}
	return nil
}

// Check looks for what Draw needs: who measures for minutes asks before.
func Check(ctx context.Context, python string) error {
	out, err := exec.CommandContext(ctx, python, "-c", "import matplotlib").CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("draw a picture: %s has no matplotlib (%w%s): pip install matplotlib, "+
			"in a virtual environment that is in PATH", python, err, lastLine(out))
	}
	return nil
}

// Draw writes the picture of a report.
func Draw(ctx context.Context, python string, report any, picture string) error {
	text, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("write the report to draw: %w", err)
	}
	c := exec.CommandContext(ctx, python, "-c", script, picture)
	c.Stdin = bytes.NewReader(text)
	out, err := c.CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("draw %s: %w%s", picture, err, lastLine(out))
	}
	return nil
}

// lastLine is where Python says what an exception is, behind ": ".
func lastLine(out []byte) string {
	out = bytes.TrimSpace(out)
	if len(out) == 0 {
		return ""
	}
	return ": " + string(out[bytes.LastIndexByte(out, '\n')+1:])
}
