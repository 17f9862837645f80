// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
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

// signalsWith runs the child with one more variable in its environment, and with a limit for each
// signal to come.
func signalsWith(t *testing.T, variable string, limit time.Duration) string {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^TestSignalsChild$", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), signalsVariable+"="+limit.String(), variable)
	out, _ := cmd.CombinedOutput() // the words tell
	return string(out)
}

func TestLeavesSignalsToGo(t *testing.T) {
	if err := Load(""); err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	out := signalsWith(t, "NONE=", testLimit)
	for _, want := range []string{"caught terminated", "caught hangup",
		"recovered runtime error: invalid memory address", "closed"} {
		if !strings.Contains(out, want) {
			t.Errorf("with UCX loaded: no %q in %s", want, out)
		}
	}
}

// What the user has set stays; and so it is seen that the test above can fail.
func TestLeavesTheUsersSettings(t *testing.T) {
	if err := Load(""); err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	out := signalsWith(t, "UCX_DEBUG_SIGNO=HUP", time.Second)
	if strings.Contains(out, "caught hangup") {
		t.Errorf("UCX_DEBUG_SIGNO=HUP of the user was overwritten: %s", out)
	}
	out = signalsWith(t, "UCX_HANDLE_ERRORS=bt", time.Second)
	if strings.Contains(out, "recovered") {
		t.Errorf("UCX_HANDLE_ERRORS=bt of the user was overwritten: %s", out)
	}
}
