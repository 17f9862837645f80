// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// ample is time that a driver of these tests cannot need.
const ample = 60 * time.Second

func start(t *testing.T, mode string) *Driver {
	t.Helper()
	p := fake(t, mode, mode, Host)
	d, err := StartDriver(p.Name, p.Command, p.Env)
	require.NoError(t, err)
	t.Cleanup(d.Kill)
	return d
}

func gone(pid int) bool { return errors.Is(unix.Kill(-pid, 0), unix.ESRCH) }

func TestDriverThatFailsIsAnErrorAndGone(t *testing.T) {
	for _, c := range []struct {
		mode  string
		limit time.Duration
		want  error
		says  string
	}{
		{"dies", ample, ErrDied, "no such device"},
		{"hangs", 200 * time.Millisecond, ErrHung, "200ms"},
		{"garbage", ample, ErrNonsense, "Warning"},
		{"endless", ample, ErrNonsense, "too long"},
		{"wrong", ample, ErrNonsense, "answer 99"},
	} {
		t.Run(c.mode, func(t *testing.T) {
			d := start(t, c.mode)
			_, err := d.Ask(context.Background(), Request{Do: DoOpen, Bytes: 4096}, c.limit)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) ||
				!strings.Contains(err.Error(), c.mode) {
				t.Fatalf("error %q, want %v that says %q", err, c.want, c.says)
			}
			d.Kill()
			require.True(t, gone(d.PID()), "the process is still there")
			if _, err := d.Ask(context.Background(), Request{Do: DoOpen}, ample); err == nil {
				t.Error("a driver that is gone answered")
			}
		})
	}
}

func TestDriverAnswers(t *testing.T) {
	d := start(t, "good")
	if _, err := d.Ask(context.Background(), Request{Do: "dance"}, ample); !errors.Is(err,
		ErrUnsupported) {
		t.Errorf("an unknown request: %v", err)
	}
	a, err := d.Ask(context.Background(), Request{Do: DoOpen, Bytes: 4096, Role: RoleTarget}, ample)
	if err != nil || a.Version != "fake 1" || a.Card == "" {
		t.Fatalf("%+v, %v", a, err)
	}
	if _, err := d.Ask(context.Background(), Request{Do: DoConnect, Card: "none"},
		ample); err == nil || errors.Is(err, ErrUnsupported) {
		t.Errorf("a bad card: %v", err)
	}
	if d.CPU() <= 0 {
		t.Error("it has taken no time of a processor")
	}
	d.Stop()
	d.Close(ample) // a stopped one ends all the same
	require.True(t, gone(d.PID()), "the process is still there")
	require.Zero(t, d.CPU(), "a process that is gone takes time of a processor")
}

func TestAskEndsWithItsContext(t *testing.T) {
	d := start(t, "hangs")
	ctx, cancel := context.WithCancelCause(context.Background())
	want := errors.New("interrupted")
	time.AfterFunc(50*time.Millisecond, func() { cancel(want) })
	if _, err := d.Ask(ctx, Request{Do: DoOpen}, ample); !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

func TestThinKeepsABoundedShare(t *testing.T) {
	for _, n := range []int{1, samplesMax, samplesMax + 1, 10*samplesMax + 3} {
		list := make([]int64, n)
		for i := range list {
			list[i] = int64(i)
		}
		kept := thin(list)
		if len(kept) > samplesMax || len(kept) < min(n, samplesMax/2) || kept[0] != 0 {
			t.Errorf("of %d samples %d are kept", n, len(kept))
		}
		for i := 1; i < len(kept); i++ {
			require.EqualValues(t, kept[min(1, len(kept)-1)], kept[i]-kept[i-1],
				"of %d samples not every so many is kept: %d after %d", n, kept[i], kept[i-1])
		}
	}
}
