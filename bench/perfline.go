// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// errPerfLine is output of ucx_perftest without a result.
var errPerfLine = errors.New("no line of results")

// perfMiB is what ucx_perftest calls MB.
const perfMiB = 1 << 20

// parsePerf reads what `ucx_perftest -f -v` prints: a line of column names and one of
// values, with whatever UCX has to say around them. The columns are found by name.
func parsePerf(out []byte, size uint64) (PerfFigure, error) {
	var names []string
	var found *PerfFigure
	var broken error
	for line := range bytes.Lines(out) {
		fields := strings.Split(strings.TrimSpace(string(line)), ",")
		switch {
		case fields[0] == "iterations":
			names = fields
		case names != nil && len(fields) == len(names):
			f, err := perfFields(names, fields, size)
			if err != nil {
				broken = err
				continue
			}
			found = &f
		}
	}
	if found == nil {
		return PerfFigure{}, fmt.Errorf("read the output of ucx_perftest: %w",
			errors.Join(errPerfLine, broken))
	}
	return *found, nil
}

// perfColumns are those that are read.
var perfColumns = []string{"iterations", "median", "overall_lat", "overall_bw", "overall_mr"}

func perfFields(names, fields []string, size uint64) (PerfFigure, error) {
	v := map[string]float64{}
	for i, name := range names {
		// The median's column bears the percentile's number; before 1.13 it was "typical".
		if name == "typical_lat" || strings.HasSuffix(name, "_percentile_lat") {
			name = "median"
		}
		if !slices.Contains(perfColumns, name) {
			// averages of the last interval, which may be empty
			continue
		}
		x, err := strconv.ParseFloat(fields[i], 64)
		if err != nil || math.IsNaN(x) || math.IsInf(x, 0) || x < 0 {
			return PerfFigure{}, fmt.Errorf("column %s says %q", name, fields[i])
		}
		v[name] = x
	}
	if len(v) != len(perfColumns) {
		return PerfFigure{}, fmt.Errorf("the columns are %s", strings.Join(names, ", "))
	}
	f := PerfFigure{Iterations: int(v["iterations"]), P50: perfMicros(v["median"]),
		Average: perfMicros(v["overall_lat"])}
	f.GBps = perfGBps(v["overall_bw"])
	if v["overall_bw"] < 100 { // two decimals are too few
		f.GBps = v["overall_mr"] * float64(size) / 1e9
	}
	if f.GBps <= 0 {
		return PerfFigure{}, errors.New("a rate of nothing")
	}
	return f, nil
}

// perfGBps converts ucx_perftest's bandwidth.
func perfGBps(mib float64) float64 { return mib * perfMiB / 1e9 }

func perfMicros(us float64) time.Duration { return time.Duration(math.Round(us * 1e3)) }

// perfComplaint is the line that says why ucx_perftest failed: the last error of
// UCX, or else the last line.
func perfComplaint(out []byte) string {
	last := ""
	for line := range bytes.Lines(out) {
		text := strings.TrimSpace(string(line))
		if _, complaint, ok := strings.Cut(text, "ERROR "); ok {
			last = complaint
		} else if text != "" && !bytes.Contains(out, []byte("ERROR ")) {
			last = text
		}
	}
	return last[:min(len(last), 200)]
}
