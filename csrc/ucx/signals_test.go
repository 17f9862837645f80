// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
)

// signalsVariable makes the test below the child of the one after it.
const signalsVariable = "SLUICE_CSRC_SIGNALS_CHILD"

// TestSignalsChild prints what works once UCX is loaded and a worker runs.
func TestSignalsChild(t *testing.T) {
	limit, err := time.ParseDuration(os.Getenv(signalsVariable))
	if err != nil {
		return
	}
	caught := make(chan os.Signal, 4)
	signal.Notify(caught, syscall.SIGTERM, syscall.SIGHUP) // before UCX, and again after
	require.NoError(t, Load(""))
	w, err := Open(Config{Workers: 1, BatchesMax: 8, WakeFD: -1, ControlFD: -1,
		GraceNanos: 1e9})
	require.NoError(t, err)
	signal.Notify(caught, syscall.SIGTERM, syscall.SIGHUP)
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		require.NoError(t, syscall.Kill(os.Getpid(), s))
		select {
		case got := <-caught:
			fmt.Println("caught", got)
		case <-time.After(limit):
			fmt.Println("lost", s)
		}
	}
	fmt.Println(dereferenceNil())
	require.NoError(t, w.Close())
	fmt.Println("closed")
}

func dereferenceNil() (what string) {
	defer func() { what = fmt.Sprint("recovered ", recover()) }()
	var p *[4]int
	return fmt.Sprint(p[3])
}

func TestLeavesSignalsToGo(t *testing.T) {
	if err := Load(""); err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^TestSignalsChild$", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), signalsVariable+"="+testLimit.String())
	out, _ := cmd.CombinedOutput() // the words tell
	for _, want := range []string{"caught terminated", "caught hangup",
		"recovered runtime error: invalid memory address", "closed"} {
		require.Contains(t, string(out), want, "with UCX loaded")
	}
}
