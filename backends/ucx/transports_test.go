// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
)

func TestSplitTransports(t *testing.T) {
	const allFar = "^posix,sysv,cma,self,xpmem,knem"
	for list, want := range map[string]transports{
		"all":            {"posix,sysv,cma,self", allFar},
		" all ":          {"posix,sysv,cma,self", allFar},
		"tcp":            {"", "tcp"},
		"rc, tcp":        {"", "rc,tcp"},
		"sm":             {"sm", ""},
		"posix,cma,tcp":  {"posix,cma", "tcp"},
		"self,tcp":       {"", "tcp"}, // self reaches nobody else
		"^ib":            {"posix,sysv,cma,self", allFar + ",ib"},
		"^sm":            {"", allFar},
		"^cma,tcp":       {"posix,sysv,self", allFar + ",tcp"},
		"^sysv,cma,self": {"posix", allFar},
		"all,tcp":        {"posix,sysv,cma,self", allFar},
	} {
		if got, err := splitTransports(list); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", list, got, err, want)
		}
	}
	for _, list := range []string{"", "^", "self", "cma,self", "tcp,,rc", "tcp,^rc", "tcp rc",
		"A=b"} {
		if got, err := splitTransports(list); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%q: %+v, %v, want %v", list, got, err, driver.ErrBounds)
		}
	}
}

func TestContextConfig(t *testing.T) {
	c := Config{Settings: []string{"A=b"}, Devices: "lo"}
	c.EnsureDefaults()
	list, err := splitTransports(c.Transports)
	require.NoError(t, err)
	near, far := c.nearConfig(list), c.farConfig(list)
	if !near.Shared || far.Shared || near.Devices != "" || far.Devices != "lo" {
		t.Errorf("near %+v, far %+v", near, far)
	}
	if !near.Pull || far.Pull {
		t.Errorf("the kernel copies near: %v, far: %v", near.Pull, far.Pull)
	}
	for _, list := range []string{"posix,sysv,self", "mm", "^cma"} {
		if own, err := splitTransports(list); err != nil || own.near == "" || own.copies() {
			t.Errorf("%s: the kernel copies: %v, %v", list, own.copies(), err)
		}
	}
	if !slices.Contains(near.Settings, "RNDV_THRESH=inf") {
		t.Errorf("near settings %v", near.Settings)
	}
	if !slices.Contains(far.Settings, "RNDV_THRESH=inf") ||
		!slices.Contains(far.Settings, "TCP_TX_SEG_SIZE=65536") {
		t.Errorf("far settings %v", far.Settings)
	}
	for _, u := range [][]string{near.Settings, far.Settings} {
		if u[len(u)-1] != "A=b" {
			t.Errorf("the user's setting is not the last of %v", u)
		}
	}
}

func TestConfigCheck(t *testing.T) {
	for what, c := range map[string]Config{
		"negative Workers":      {Workers: -1},
		"too many Workers":      {Workers: workersMax + 1},
		"BatchesMax no power":   {BatchesMax: 1000},
		"negative NotifyMax":    {NotifyMax: -1},
		"KeysMax":               {KeysMax: keys.Limit + 1},
		"ConnsMax":              {ConnsMax: -1},
		"Grace too short":       {Grace: time.Millisecond},
		"Grace too long":        {Grace: time.Hour},
		"FenceGrace over Grace": {FenceGrace: time.Hour},
		"Failure below Grace":   {Failure: time.Second},
		"negative Spin":         {Spin: -1},
		"Transports":            {Transports: "self"},
	} {
		if b, err := newFake(c); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%s: %v, %v", what, b, err)
		}
	}
}
