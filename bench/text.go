// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// Text prints results as a table for people, one row for each baseline.
func Text(w io.Writer, results []Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "backend\top\tsize\tbatch\tthreads\tGB/s\tops/s\tp50 µs\tp99 "+
		"µs\tallocs/op\tbaseline\tGB/s\tp50 µs\tratio\t")
	for i := range results {
		r := &results[i]
		op := r.Op
		if r.Pages {
			op += " pages"
		}
		if r.spreads() {
			op += " of " + RoundSize(r.Spread)
		}
		if r.Gather {
			op += " gathered"
		}
		if r.Hot {
			op += " hot"
		}
		name := r.Backend
		if r.Lane != "" {
			name += " " + r.Lane
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%.2f\t%.0f\t%.2f\t%.2f\t%.2f\t", name, op,
			r.size(), r.Batch, r.Threads, r.GBps, r.OpsPerS, r.P50us, r.P99us,
			r.AllocsPerOp)
		for j, b := range r.Baselines {
			if j > 0 {
				fmt.Fprint(t, "\n\t\t\t\t\t\t\t\t\t\t")
			}
			fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.3f\t", b.Name, b.GBps, b.P50us, r.RatioTo(&b))
		}
		if len(r.Baselines) == 0 {
			fmt.Fprint(t, "-\t\t\t\t")
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range results {
		for _, line := range results[i].remarks() {
			if _, err := fmt.Fprintln(w, line); err != nil {
				return err
			}
		}
	}
	return nil
}

// size is Size for people. Only that of a piece is one that a flag takes.
func (r *Result) size() string {
	if r.Op == ReshapeOp {
		return RoundSize(r.Size)
	}
	return FormatSize(r.Size)
}

// remarks are the further figures and the notes, a line each.
func (r *Result) remarks() []string {
	var list []string
	title := r.Workload
	if title != "" {
		title += ", "
	}
	title += fmt.Sprintf("%s %s %d x %s", strings.TrimSpace(r.Backend+" "+r.Lane), r.Op, r.Batch,
		r.size())
	var figures []string
	for _, unit := range slices.Sorted(maps.Keys(r.Extra)) {
		v, digits := r.Extra[unit], 1
		if v == math.Trunc(v) { // a count
			digits = 0
		}
		figures = append(figures, fmt.Sprintf("%.*f %s", digits, v, unit))
	}
	if len(figures) > 0 {
		list = append(list, title+": "+strings.Join(figures, ", "))
	}
	for _, n := range r.Notes {
		list = append(list, title+": "+n)
	}
	return list
}
