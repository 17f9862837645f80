// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// VerbsTest runs the benchmarks of package perftest (ib_write_bw, ib_read_bw, ib_write_lat)
// as a server on one device and a client on another, or on the same, of this host. What they
// measure: a message that lies always at one place, over one queue pair, with so many
// under way; of latency a byte that the other end waits for and answers, half of the round
// trip. Not for several goroutines at once.
type VerbsTest struct {
	Dir            string // of the programs; "": as the shell finds them
	Client, Server VerbsPort
	Time           time.Duration // of one measurement, about; 0: 1 s

	pair perfPair
}

// VerbsPort is a port of a device.
type VerbsPort struct {
	Device string // "mlx5_0"
	Port   int
	GID    int // index
}

// VerbsName is how results call these benchmarks.
const VerbsName = "perftest"

// Measure runs a test once, the first time after a short run that finds out how many
// messages take Time. Without the programs the error is a *driver.UnavailableError.
func (v *VerbsTest) Measure(ctx context.Context, r PerfRun) (PerfFigure, error) {
	v.pair.tool, v.pair.time = v, orSecond(v.Time)
	f, err := v.pair.measure(ctx, r)
	for again := 0; again < verbsAgain && errors.Is(err, errVerbsLine); again++ {
		f, err = v.pair.measure(ctx, r)
	}
	return f, err
}

// verbsAgain is how often a result that is no number is measured again: perftest counts
// cycles, and where the clock is emulated it finds now and then that there were none.
const verbsAgain = 3

func (v *VerbsTest) find(r *PerfRun) (string, error) {
	path, err := exec.LookPath(filepath.Join(v.Dir, r.Test))
	if err != nil {
		return "", &driver.UnavailableError{Backend: VerbsName, Reason: err.Error(),
			Fix: "apt-get install perftest"}
	}
	return path, nil
}

func (v *VerbsTest) environment() []string { return nil }

func (v *VerbsTest) server(r *PerfRun, n int) []string { return v.Server.args(r, n) }

func (v *VerbsTest) client(r *PerfRun, n int) []string { return v.Client.args(r, n) }

// args are the options, which both ends must be told. -F: a clock rate that changes is no
// error, since the result is none of the clock's.
func (p *VerbsPort) args(r *PerfRun, n int) []string {
	list := []string{"-F", "-d", p.Device, "-i", strconv.Itoa(p.Port), "-x", strconv.Itoa(p.GID),
		"-s", strconv.FormatUint(r.Size, 10), "-n", strconv.Itoa(n)}
	if !strings.HasSuffix(r.Test, "_lat") {
		list = append(list, "-t", strconv.Itoa(r.Window))
	}
	return list
}

func (v *VerbsTest) parse(out []byte, r *PerfRun) (PerfFigure, error) {
	return parseVerbs(out, r.Size)
}

// complaint is the first line that is not of the banner.
func (v *VerbsTest) complaint(out []byte) string {
	for line := range bytes.Lines(out) {
		text := strings.TrimSpace(string(line))
		banner := strings.HasPrefix(text, "---") || strings.Contains(text, " : ") ||
			strings.Contains(text, "inline feature") ||
			strings.HasSuffix(text, "Test") || strings.HasPrefix(text, "*") ||
			strings.Contains(text, "Waiting for client")
		if text != "" && !banner {
			return text[:min(len(text), 200)]
		}
	}
	return ""
}

// errVerbsLine is output of perftest without a result.
var errVerbsLine = errors.New("no line of results")

// parseVerbs reads the line of values behind the line of column names, in which some
// names have blanks: those that are read stand before such, or are found from the end.
func parseVerbs(out []byte, size uint64) (PerfFigure, error) {
	var names []string
	for line := range bytes.Lines(out) {
		fields := strings.Fields(string(line))
		switch {
		case len(fields) > 1 && fields[0] == "#bytes":
			names = fields
		case names != nil && len(fields) > 1 && fields[0] == strconv.FormatUint(size, 10):
			f, err := verbsFields(names, fields, size)
			if err != nil {
				return PerfFigure{}, fmt.Errorf("read the output of %s: %w: %w", VerbsName,
					errVerbsLine, err)
			}
			return f, nil
		}
	}
	return PerfFigure{}, fmt.Errorf("read the output of %s: %w", VerbsName, errVerbsLine)
}

// verbsFields takes bandwidth ("BW average[MB/sec]", 2^20 bytes) or latency apart.
func verbsFields(names, fields []string, size uint64) (f PerfFigure, err error) {
	number := func(i int) float64 {
		if i < 0 || i >= len(fields) {
			err = fmt.Errorf("the columns are %s", strings.Join(names, " "))
			return 0
		}
		v, e := strconv.ParseFloat(fields[i], 64)
		if e != nil || !(v > 0) || math.IsInf(v, 0) {
			err = fmt.Errorf("column %d says %q", i, fields[i])
		}
		return v
	}
	f.Iterations = int(number(1))
	if typical := slices.Index(names, "t_typical[usec]"); typical > 0 {
		f.P50 = perfMicros(number(typical)) // the average may say inf, of a clock that went astray
		if f.Average = f.P50; f.P50 > 0 {
			f.GBps = GBps(size, f.P50)
		}
		return f, err
	}
	if len(fields) != 5 || !slices.Contains(names, "average[MB/sec]") {
		return f, fmt.Errorf("the columns are %s", strings.Join(names, " "))
	}
	f.GBps = number(3) * perfMiB / 1e9
	if rate := number(4) * 1e6; number(3) < 1 { // two decimals are too few
		f.GBps = rate * float64(size) / 1e9
	}
	if err == nil {
		f.Average = time.Duration(float64(size) / f.GBps)
		f.P50 = f.Average
	}
	return f, err
}
