// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// FioName is the program that stands beside files.
const FioName = "fio"

// errFio is output of fio without a result.
var errFio = errors.New("no result")

// fioSide is what fio says of one direction.
type fioSide struct {
	Requests float64 `json:"total_ios"`
	Runtime  float64 `json:"runtime"` // ms
	Latency  struct {
		Percentile map[string]float64 `json:"percentile"` // ns
	} `json:"clat_ns"`
}

// fioReport is the part of fio's JSON that is of use.
type fioReport struct {
	Jobs []struct {
		Read   fioSide `json:"read"`
		Write  fioSide `json:"write"`
		User   float64 `json:"usr_cpu"` // percent of one processor
		System float64 `json:"sys_cpu"`
	} `json:"jobs"`
}

// Fio runs fio over a file: requests at random places by io_uring, a shape's Batch under way at
// once, with buffers and files registered. Not for several goroutines at once.
type Fio struct {
	Path   string
	Cached bool          // through the page cache; else past it, for sizes that are whole blocks
	Time   time.Duration // of one measurement; 0: 1 s
}

// Measure runs it once, over the first Spread bytes of the file: the rate, and the median of a
// request. Without fio the error says what to install.
func (f *Fio) Measure(ctx context.Context, s *Shape) (gbps float64, p50 time.Duration, err error) {
	figure, err := runFio(ctx, f.Path, s, orSecond(f.Time), f.Cached)
	return figure.rate * float64(s.Size) / 1e9, figure.p50, err
}

// runFio reads or writes at random places of a file.
func runFio(ctx context.Context, path string, s *Shape, t time.Duration, cached bool) (diskFigure,
	error) {
	tool, err := exec.LookPath(FioName)
	if err != nil {
		return diskFigure{}, fmt.Errorf("%s is not installed: apt-get install fio", FioName)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*t+30*time.Second)
	defer cancel()
	direct := "--direct=1"
	if cached {
		direct = "--direct=0"
	}
	args := []string{"--name=beside", "--filename=" + path, "--rw=rand" + s.Op.String(),
		fmt.Sprint("--bs=", s.Size), fmt.Sprint("--iodepth=", s.Batch),
		fmt.Sprint("--size=", s.Spread),
		"--ioengine=io_uring", direct, "--fixedbufs=1", "--registerfiles=1", "--norandommap",
		"--time_based",
		fmt.Sprintf("--runtime=%dms", t.Milliseconds()), "--output-format=json"}
	if s.Durable {
		args = append(args, fmt.Sprint("--fdatasync=", s.Batch))
	}
	out, err := exec.CommandContext(ctx, tool, args...).Output()
	if err != nil {
		return diskFigure{}, fmt.Errorf("%s: %w: %.200s", FioName, err, out)
	}
	return parseFio(out, s)
}

func parseFio(out []byte, s *Shape) (diskFigure, error) {
	var r fioReport
	if err := json.Unmarshal(out, &r); err != nil || len(r.Jobs) != 1 {
		return diskFigure{}, fmt.Errorf("%s printed %.200q: %w", FioName, out,
			errors.Join(errFio, err))
	}
	j := &r.Jobs[0]
	side := &j.Read
	if s.Op == driver.Write {
		side = &j.Write
	}
	if side.Requests == 0 || side.Runtime == 0 {
		return diskFigure{}, fmt.Errorf("%s has measured nothing: %w", FioName, errFio)
	}
	return diskFigure{
		rate: side.Requests / side.Runtime * 1e3,
		cpu:  time.Duration((j.User + j.System) / 100 * side.Runtime * 1e6 / side.Requests),
		p50:  time.Duration(side.Latency.Percentile["50.000000"]),
	}, nil
}
