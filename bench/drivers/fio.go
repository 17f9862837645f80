// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/bench"
)

// fioEnd has fio stand beside on lane file: requests of a size at random places of the card's file,
// as many under way as a batch has pieces. It knows no lists of places and ends no batch before it
// begins another.
type fioEnd struct {
	base
	fileCard
}

// fioTime is how long one run lasts, and fioLimit how long one may.
const (
	fioTime  = 300 * time.Millisecond
	fioLimit = 30 * time.Second
)

// Open implements bench.End.
func (e *fioEnd) Open(r *bench.Request) (bench.Answer, error) {
	return bench.Answer{Version: "fio of the system",
			Settings: "io_uring, buffers and files registered, a queue that is always full"},
		onlyLane(r, bench.File, bench.CacheDisk)
}

// Connect implements bench.End.
func (e *fioEnd) Connect(card string) (err error) {
	e.fileCard, err = readFileCard(card)
	return err
}

// Prepare implements bench.End. One run says how long a batch takes.
func (e *fioEnd) Prepare(op string, size uint64, local, _ []int32) (bench.Posting, error) {
	batch := len(local)
	args := []string{"--filename=" + e.Path, fmt.Sprint("--size=", e.fileCard.Bytes),
		fmt.Sprint("--bs=", size), fmt.Sprint("--iodepth=", batch), "--norandommap", "--time_based",
		fmt.Sprintf("--runtime=%dms", fioTime.Milliseconds())}
	direction := "randwrite"
	switch op {
	case bench.OpRead:
		direction = "randread"
	case bench.OpDurable:
		args = append(args, fmt.Sprint("--fdatasync=", batch))
	}
	if size%wholeBlock == 0 {
		args = append(args, "--direct=1")
	}
	return measuring(func(ctx context.Context) (time.Duration, error) {
		rate, err := runFio(ctx, direction, args)
		return time.Duration(float64(batch) / rate * 1e9), err
	}), nil
}

// runFio returns the requests of a second, by io_uring with buffers and files registered.
func runFio(ctx context.Context, direction string, args []string) (rate float64, err error) {
	tool, err := exec.LookPath("fio")
	if err != nil {
		return 0, fmt.Errorf("fio is not installed: apt-get install fio: %w", bench.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, fioLimit)
	defer cancel()
	c := exec.CommandContext(ctx, tool, append(args, "--name=beside", "--rw="+direction, "--thread",
		"--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--output-format=json")...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.Output()
	if err != nil {
		return 0, fmt.Errorf("fio: %w: %.200s", err, out)
	}
	return parseFio(out, direction)
}

// parseFio reads fio's JSON.
func parseFio(out []byte, direction string) (rate float64, err error) {
	type side struct {
		Requests float64 `json:"total_ios"`
		Millis   float64 `json:"runtime"`
	}
	var report struct {
		Jobs []struct{ Read, Write side }
	}
	if err := json.Unmarshal(out, &report); err != nil || len(report.Jobs) != 1 {
		return 0, fmt.Errorf("fio printed %.200q: %w", out, bench.ErrNonsense)
	}
	s := report.Jobs[0].Write
	if strings.HasSuffix(direction, "read") {
		s = report.Jobs[0].Read
	}
	if s.Requests <= 0 || s.Millis <= 0 {
		return 0, fmt.Errorf("fio has measured nothing: %w", bench.ErrNonsense)
	}
	return s.Requests / s.Millis * 1e3, nil
}
