// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSplit(t *testing.T) {
	for spec, want := range map[string][]string{
		"shm":                        {"shm"},
		"shm:workers=2":              {"shm", "workers=2"},
		"rdma:devices=a,b:1,rails=2": {"rdma", "devices=a,b:1", "rails=2"},
		"ucx:transports=tcp,self":    {"ucx", "transports=tcp,self"},
		"tcp:listen=[::1]:0":         {"tcp", "listen=[::1]:0"},
		"tcp:a,b":                    {"tcp", "a,b"}, // SetOptions names it
		`tcp:key=/a\,b=c/k,conns=2`:  {"tcp", "key=/a,b=c/k", "conns=2"},
	} {
		name, words, err := Split(spec)
		require.NoError(t, err, spec)
		require.Equal(t, want, append([]string{name}, words...))
	}
	for spec, want := range map[string]string{"": "want a name", ":a=1": "want a name",
		"shm:": "want a name", "tcp:conns=,listen=:0": "option conns is empty"} {
		_, _, err := Split(spec)
		require.ErrorAs(t, err, new(*Error), spec)
		require.ErrorContains(t, err, want)
	}
}

type config struct {
	Listen    string
	RingBytes int
	PinMax    uint64
	MTU       int
	Grace     time.Duration
	Buffered  bool
	Devices   []int
	Settings  []string
	Hidden    map[string]int
}

func TestSetOptions(t *testing.T) {
	c := struct {
		Path string
		config
	}{}
	require.NoError(t, SetOptions(&c, []string{"path=x=y", "listen=:0", "ring_bytes=64KiB",
		"pin_max=1GiB", "mtu=1024", "grace=50ms", "buffered=true", "devices=0", "devices=2,5",
		"settings=a", "settings=b"}))
	require.Equal(t, "x=y", c.Path)
	require.Equal(t, config{Listen: ":0", RingBytes: 65536, PinMax: 1 << 30, MTU: 1024,
		Grace: 50 * time.Millisecond, Buffered: true, Devices: []int{0, 2, 5},
		Settings: []string{"a", "b"}}, c.config)
	for word, want := range map[string]string{
		"listen":                   `option "listen": write it as name=value`,
		"hidden=1":                 `option "hidden" does not exist: there are path, listen, ring_bytes,`,
		"mtu=x":                    "option mtu=x: want a whole number, or a size such as 64KiB",
		"ring_bytes=9999999999GiB": "option ring_bytes=9999999999GiB: ",
		"grace=5":                  "option grace=5: want a time such as 50ms or 5s",
		"buffered=maybe":           "option buffered=maybe: want true or false",
		"devices=0,x":              "option devices=0,x: want whole numbers with commas between",
		"pin_max=-1":               "option pin_max=-1: want a number from 0",
		"pin_max=1.5":              "option pin_max=1.5: want a number from 0",
		"mtu=1.5":                  "option mtu=1.5: want a whole number",
	} {
		err := SetOptions(&c, []string{word})
		require.ErrorAs(t, err, new(*Error), word)
		require.ErrorContains(t, err, want)
	}
}

func TestOptionName(t *testing.T) {
	for field, name := range map[string]string{"RingBytes": "ring_bytes", "MTU": "mtu",
		"BytesADay": "bytes_a_day", "MaxMTU": "max_mtu"} {
		require.Equal(t, name, OptionName(field))
	}
}
