// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

func TestMakeDiskFileEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	path := filepath.Join(t.TempDir(), "file")
	if err := MakeDiskFile(ctx, path, 1<<30); !errors.Is(err, cause) {
		t.Errorf("%v, not %v", err, cause)
	}
	if i, err := os.Stat(path); err != nil || i.Size() > 64<<20 {
		t.Errorf("it went on: %v, %v", i, err)
	}
}

func TestDisk(t *testing.T) {
	leak.Check(t)
	const spread = 16 << 20
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, MakeDiskFile(t.Context(), path, spread))
	o := Options{Rounds: 2, Slice: 50 * time.Millisecond}
	for _, s := range []Shape{
		{Op: driver.Read, Size: 64 << 10, Batch: 8, Spread: spread, Threads: 1},
		{Op: driver.Write, Size: 4 << 10, Batch: 8, Spread: spread, Threads: 1},
		{Op: driver.Read, Size: 656, Batch: 300, Pages: true, Spread: spread, Threads: 1},
		{Op: driver.Read, Size: 656, Batch: 300, Pages: true, Dense: 8, Spread: spread, Threads: 1},
		{Op: driver.Write, Size: 4 << 10, Batch: 8, Durable: true, Spread: spread, Threads: 1},
	} {
		r, err := Disk(t.Context(), path, s, o)
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		if r.GBps <= 0 || r.P50us <= 0 || r.Extra["cpu-us"] <= 0 ||
			!strings.Contains(r.Route, "io_uring") && !strings.Contains(r.Route, "threads") {
			t.Errorf("%+v: %+v", s, r)
		}
		if len(r.Baselines) != 2 && !strings.Contains(strings.Join(r.Notes, " "), "not installed") {
			t.Errorf("%+v: %d baselines, notes %q", s, len(r.Baselines), r.Notes)
		}
		for _, b := range r.Baselines {
			if b.GBps <= 0 || b.P50us <= 0 {
				t.Errorf("%+v: %+v", s, b)
			}
		}
	}
	_, err := Disk(t.Context(), path, Shape{Op: driver.Read, Size: 4096, Batch: 1,
		Spread: 2 * spread, Threads: 1}, o)
	if !errors.Is(err, ErrShape) {
		t.Errorf("a file that is too short: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Disk(ended, path, Shape{Op: driver.Read, Size: 4096, Batch: 1, Spread: spread,
		Threads: 1}, o); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: %v", err)
	}
}

func TestDiskLoad(t *testing.T) {
	leak.Check(t)
	dir := t.TempDir()
	r, err := Load(t.Context(), dir, 64<<20, Options{Rounds: 2})
	if err != nil || r.GBps <= 0 || len(r.Baselines) < 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if left, err := filepath.Glob(dir + "/*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Load(ended, dir, 64<<20, Options{Rounds: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: %v", err)
	}
}

func TestParseFio(t *testing.T) {
	const out = `{"jobs":[{"usr_cpu":10,"sys_cpu":30,"write":{"total_ios":0,"runtime":0},
		"read":{"total_ios":8000,"runtime":1000,"clat_ns":{"percentile":{"50.000000":70000}}}}]}`
	f, err := parseFio([]byte(out), &Shape{Op: driver.Read})
	if err != nil || f.rate != 8000 || f.p50 != 70*time.Microsecond ||
		f.cpu != 50*time.Microsecond {
		t.Errorf("%+v, %v", f, err)
	}
	for _, bad := range []string{"", "{}", "nonsense", `{"jobs":[{}]}`} {
		if _, err := parseFio([]byte(bad), &Shape{Op: driver.Read}); !errors.Is(err, errFio) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := parseFio([]byte(out), &Shape{Op: driver.Write}); !errors.Is(err, errFio) {
		t.Errorf("the other direction: %v", err)
	}
}
