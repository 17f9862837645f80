// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/allocs"
)

const loopLimit = testLimit

// loopEnds are two loops, the far one of which is moved until the test ends.
type loopEnds struct {
	near, far     *Loop
	local, remote []byte
}

func openLoop(t *testing.T, transports, devices string) *Loop {
	t.Helper()
	err := Load("")
	var l *Loop
	if err == nil {
		l, err = OpenLoop(transports, devices)
	}
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	return l
}

func openLoops(t *testing.T, transports, devices string) *loopEnds {
	t.Helper()
	e := &loopEnds{near: openLoop(t, transports, devices), far: openLoop(t, transports, devices)}
	var stop atomic.Bool
	over := make(chan struct{})
	t.Cleanup(func() {
		e.near.Close(loopLimit)
		stop.Store(true)
		<-over
		e.far.Close(loopLimit)
	})
	var err error
	e.local, err = e.near.Allocate(testBytes)
	require.NoError(t, err)
	e.remote, err = e.far.Allocate(testBytes)
	require.NoError(t, err)
	offer, err := e.far.Offer()
	require.NoError(t, err)
	go func() {
		defer close(over)
		for !stop.Load() {
			e.far.Progress(time.Millisecond)
		}
	}()
	require.NoError(t, e.near.Connect(offer))
	return e
}

func TestLoopMovesItsPieces(t *testing.T) {
	for name, lanes := range map[string][2]string{"memory": {"posix,sysv,cma,self", ""},
		"tcp": {"tcp", "lo"}} {
		t.Run(name, func(t *testing.T) {
			e := openLoops(t, lanes[0], lanes[1])
			for round, size := range []uint64{1, 656, 9000} {
				for _, op := range []driver.Op{driver.Write, driver.Read} {
					fill(e.local, uint64(round))
					fill(e.remote, uint64(round)+100)
					wantLocal, wantRemote := bytes.Clone(e.local), bytes.Clone(e.remote)
					var descs []driver.Desc
					for i := range uint64(50) {
						descs = append(descs, driver.Desc{Local: i * 10000,
							Remote: (49 - i) * 20001, Len: size})
					}
					want(op, wantLocal, wantRemote, descs)
					b, err := e.near.Batch(descs, 8)
					require.NoError(t, err)
					posted, err := e.near.Move(op, b, loopLimit)
					if err != nil || posted <= 0 || posted > loopLimit {
						t.Fatalf("%v of %d bytes: posted in %v, %v", op, size, posted, err)
					}
					if !bytes.Equal(e.local, wantLocal) || !bytes.Equal(e.remote, wantRemote) {
						t.Fatalf("%v of %d bytes moved other bytes", op, size)
					}
				}
			}
		})
	}
}

func TestLoopRefusesWhatIsNotItsOwn(t *testing.T) {
	e := openLoops(t, "posix,sysv,cma,self", "")
	for _, bad := range []driver.Desc{{Local: testBytes, Len: 1}, {Remote: testBytes - 1, Len: 2},
		{Local: 1, Len: ^uint64(0)}} {
		var piece *driver.PieceError
		if _, err := e.near.Batch([]driver.Desc{{Len: 1}, bad}, 1); !errors.As(err, &piece) ||
			piece.Piece != 1 || !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if _, err := e.near.Batch(nil, 1); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("no pieces: %v", err)
	}
	b, err := e.near.Batch([]driver.Desc{{Len: 1}}, 1)
	require.NoError(t, err)
	if _, err := e.far.Move(driver.Write, b, time.Second); err == nil {
		t.Error("a batch of another loop was moved")
	}
	if _, err := e.near.Allocate(1); err == nil {
		t.Error("a second memory")
	}
	if err := e.near.Connect(Offer{}); !errors.Is(err, driver.ErrBadToken) {
		t.Errorf("an empty offer: %v", err)
	}
}

// A peer that is not moved must not keep a benchmark for ever.
func TestLoopEndsWithItsLimit(t *testing.T) {
	near, far := openLoop(t, "tcp", "lo"), openLoop(t, "tcp", "lo")
	defer far.Close(0)
	defer near.Close(0)
	if _, err := near.Allocate(testBytes); err != nil {
		t.Fatal(err)
	}
	if _, err := far.Allocate(testBytes); err != nil {
		t.Fatal(err)
	}
	offer, err := far.Offer()
	require.NoError(t, err)
	require.NoError(t, near.Connect(offer))
	b, err := near.Batch([]driver.Desc{{Len: testBytes}}, 1)
	require.NoError(t, err)
	begin := time.Now()
	if _, err := near.Move(driver.Write, b, 50*time.Millisecond); !errors.Is(err,
		driver.ErrTimeout) {
		t.Errorf("nobody answers: %v, want ErrTimeout", err)
	}
	if _, err := near.Move(driver.Write, b, time.Second); err == nil ||
		errors.Is(err, driver.ErrTimeout) {
		t.Errorf("after that: %v, want a refusal", err)
	}
	if took := time.Since(begin); took > testLimit {
		t.Errorf("took %v", took)
	}
}

func TestLoopDoesNotAllocate(t *testing.T) {
	e := openLoops(t, "posix,sysv,cma,self", "")
	b, err := e.near.Batch([]driver.Desc{{Len: 656}, {Local: 700, Remote: 5000, Len: 656}}, 32)
	require.NoError(t, err)
	if n := allocs.PerRun(50, func() {
		if _, err := e.near.Move(driver.Write, b, loopLimit); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a batch, want 0", n)
	}
}

// want applies descs byte by byte, the slow and obvious way.
func want(op driver.Op, local, remote []byte, descs []driver.Desc) {
	for _, d := range descs {
		l, r := local[d.Local:d.Local+d.Len], remote[d.Remote:d.Remote+d.Len]
		if op == driver.Write {
			copy(r, l)
		} else {
			copy(l, r)
		}
	}
}
