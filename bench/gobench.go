// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
)

// GoBench prints results in the Go benchmark format, which benchstat compares:
// one line for the transfer and one for each baseline, with the shape in the
// name. MB/s is 1e6 bytes a second, as go test prints it.
func GoBench(w io.Writer, results []Result) error {
	if _, err := fmt.Fprintf(w, "goos: %s\ngoarch: %s\npkg: github.com/sluicehq/sluice/bench\n",
		runtime.GOOS, runtime.GOARCH); err != nil {
		return err
	}
	for i := range results {
		if err := goBenchLines(w, &results[i]); err != nil {
			return err
		}
	}
	return nil
}

func goBenchLines(w io.Writer, r *Result) error {
	batchBytes := float64(r.Size) * float64(r.Batch)
	nsPerOp := 0.0
	if r.OpsPerS > 0 {
		nsPerOp = 1e9 / r.OpsPerS
	}
	_, err := fmt.Fprintf(w, "Benchmark%s \t%8d\t%12.1f ns/op\t%10.2f MB/s\t%8.3f p50-us\t%8.3f "+
		"p99-us\t%6.3f ratio\t%8.2f allocs/op%s\n",
		goBenchName(r, r.Backend), max(r.Ops, 1), nsPerOp, r.GBps*1e3, r.P50us, r.P99us, r.Ratio,
		r.AllocsPerOp, goBenchExtra(r))
	if err != nil {
		return err
	}
	for _, b := range r.Baselines {
		ns := 0.0
		if b.GBps > 0 {
			ns = batchBytes / b.GBps
		}
		if _, err := fmt.Fprintf(w, "Benchmark%s \t%8d\t%12.1f ns/op\t%10.2f MB/s\t%8.3f p50-us\n",
			goBenchName(r, b.Name), max(r.Ops, 1), ns, b.GBps*1e3, b.P50us); err != nil {
			return err
		}
	}
	for _, note := range r.Notes { // benchstat passes over what it does not know
		if _, err := fmt.Fprintf(w, "# %s: %s\n", goBenchName(r, r.Backend), note); err != nil {
			return err
		}
	}
	return nil
}

// goBenchExtra are the ratios to all baselines but the first, and the further figures.
func goBenchExtra(r *Result) string {
	var s strings.Builder
	for i := 1; i < len(r.Baselines); i++ {
		fmt.Fprintf(&s, "\t%6.3f ratio-%s", r.RatioTo(&r.Baselines[i]), r.Baselines[i].Name)
	}
	for _, unit := range slices.Sorted(maps.Keys(r.Extra)) {
		fmt.Fprintf(&s, "\t%10.1f %s", r.Extra[unit], unit)
	}
	return s.String()
}

// goBenchName is what benchstat takes apart: /key=value pairs and the number of
// threads behind a dash.
func goBenchName(r *Result, by string) string {
	op := r.Op
	if op != "" {
		op = strings.ToUpper(op[:1]) + op[1:]
	}
	pages := ""
	if r.Pages {
		pages = "/pages"
	}
	if r.spreads() {
		pages += fmt.Sprintf("/spread=%d", r.Spread)
	}
	if r.Gather {
		pages += "/gather"
	}
	if r.Hot {
		pages += "/hot"
	}
	if r.Workload != "" {
		pages += "/workload=" + strings.NewReplacer("/", ",", " ", "_").Replace(r.Workload)
	}
	if r.Lane != "" {
		pages += "/lane=" + r.Lane
	}
	return fmt.Sprintf("%s%s/size=%d/batch=%d/by=%s-%d", op, pages, r.Size, r.Batch, by, r.Threads)
}
