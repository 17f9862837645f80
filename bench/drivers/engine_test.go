// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

// met are both ends of a driver, in this process.
type met struct {
	end
	far func() []byte // what the other end holds
}

func opened(t *testing.T, name string, args []string, r bench.Request) (end, bench.Answer) {
	t.Helper()
	e, err := byName[name](args)
	require.NoError(t, err)
	t.Cleanup(e.close)
	a, err := e.Open(&r)
	require.NoError(t, err)
	require.NotEmpty(t, a.Version)
	require.NotEmpty(t, a.Settings)
	return e, a
}

// meet opens a driver on a lane, with its target unless it holds both memories itself.
func meet(t *testing.T, lane bench.Lane, bytes uint64, name string, args ...string) met {
	t.Helper()
	request := bench.Request{Lane: string(lane), Name: "a", Role: bench.RoleTarget, Bytes: bytes,
		FarBytes: bytes}
	switch {
	case name == "memcpy" || lane == bench.Process || lane == bench.GPU || lane == bench.GPUFile:
		e, _ := opened(t, name, args, request)
		return met{e, e.(bench.Alone).Far}
	case lane == bench.File:
		keeper, a := opened(t, "file", []string{t.TempDir()}, request)
		e, _ := opened(t, name, args, request)
		require.NoError(t, e.Connect(a.Card))
		return met{e, func() []byte {
			all := make([]byte, bytes)
			_, err := keeper.(bench.Keeper).ReadAt(all, 0)
			require.NoError(t, err)
			return all
		}}
	}
	target, theirs := opened(t, name, args, request)
	request.Role, request.Name = bench.RoleInitiator, "b"
	e, ours := opened(t, name, args, request)
	require.NoError(t, e.Connect(theirs.Card))
	require.NoError(t, target.Connect(ours.Card))
	return met{e, target.Memory}
}

func (m *met) move(t *testing.T, op string, size uint64, local, remote []int32) {
	t.Helper()
	p, err := m.Prepare(op, size, local, remote)
	require.NoError(t, err)
	require.NoError(t, errors.Join(p.Post(context.Background()), p.Close()))
}

// TestPiecesComeToTheirSlots writes, and reads back, scattered and adjacent pieces.
func TestPiecesComeToTheirSlots(t *testing.T) {
	const whole = 1 << 20
	for _, c := range []struct {
		lane bench.Lane
		name string
		args []string
	}{
		{bench.Host, "memcpy", nil},
		{bench.Host, "memcpy", []string{"huge"}},
		{bench.Process, "engine", []string{"mem"}},
		{bench.Host, "engine", []string{"shm:workers=2"}},
		{bench.Host, "engine", []string{"shm", "foreign"}},
		{bench.TCP, "engine", []string{"tcp:listen=127.0.0.1:0,plaintext=true"}},
		{bench.File, "engine", []string{"posix"}},
		{bench.File, "pread", nil},
	} {
		t.Run(fmt.Sprint(c.lane, c.name, c.args), func(t *testing.T) {
			m := meet(t, c.lane, whole, c.name, c.args...)
			memory := m.Memory()
			for i := range memory {
				memory[i] = byte(i * 7 >> 3)
			}
			want := bytes.Clone(memory)
			writes := []string{bench.OpWrite}
			if c.lane == bench.File {
				writes = append(writes, bench.OpDurable)
			}
			for _, size := range []uint64{4096, 656} {
				for _, lists := range [][2][]int32{{{3, 0, 7}, {5, 9, 2}}, {{4, 5}, {20, 21}}} {
					local, remote := lists[0], lists[1]
					for _, op := range writes {
						m.move(t, op, size, local, remote)
						far := m.far()
						for i := range local {
							require.Equal(t, slice(want, local[i], size),
								slice(far, remote[i], size), "%s of %d bytes", op, size)
						}
					}
					clear(memory)
					m.move(t, bench.OpRead, size, local, remote)
					for i := range local {
						require.Equal(t, slice(want, local[i], size),
							slice(memory, local[i], size), "read of %d bytes", size)
					}
					copy(memory, want)
				}
			}
			if _, err := m.Prepare(bench.OpDurable, 656, []int32{1}, []int32{1}); c.lane !=
				bench.File && err == nil {
				t.Error("memory is durable")
			}
		})
	}
}

// TestMessagesCome sends one, and answers.
func TestMessagesCome(t *testing.T) {
	for _, c := range []struct {
		lane bench.Lane
		name string
		args []string
	}{{bench.Host, "engine", []string{"shm"}}, {bench.Host, "sockets", nil},
		{bench.TCP, "sockets", []string{"2"}}} {
		t.Run(fmt.Sprint(c.lane, c.name), func(t *testing.T) {
			request := bench.Request{Lane: string(c.lane), Name: "a", Role: bench.RoleTarget,
				Bytes: 1 << 20}
			target, theirs := opened(t, c.name, c.args, request)
			request.Role, request.Name = bench.RoleInitiator, "b"
			initiator, ours := opened(t, c.name, c.args, request)
			require.NoError(t, initiator.Connect(theirs.Card))
			require.NoError(t, target.Connect(ours.Card))
			for _, ends := range [][2]end{{initiator, target}, {target, initiator}} {
				require.NoError(t, ends[0].Notify([]byte("message")))
				for got := false; !got; {
					var err error
					got, err = ends[1].Receive()
					require.NoError(t, err)
				}
			}
		})
	}
}

func TestSocketsMoveAsManyBytes(t *testing.T) {
	m := meet(t, bench.TCP, 4096, "sockets")
	for _, n := range []int{8, 1, 9} { // also more than there is memory, all at one place
		m.move(t, bench.OpWrite, 80<<10, make([]int32, n), make([]int32, n))
		m.move(t, bench.OpRead, 80<<10, make([]int32, n), make([]int32, n))
	}
	e, err := newSockets(nil)
	require.NoError(t, err)
	_, err = e.Open(&bench.Request{Lane: "host", Threads: 2})
	require.ErrorIs(t, err, bench.ErrUnsupported)
}
