// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/driver"
)

// wanted is an entry of Config.Devices.
type wanted struct {
	device string
	port   int // 0: every active one
	gid    int // -1: by the rule
}

// splitDevices reads "mlx5_0,mlx5_1:1,mlx5_2:1#3"; an empty list is nil.
func splitDevices(list string) (all []wanted, err error) {
	if list == "" {
		return nil, nil
	}
	for entry := range strings.SplitSeq(list, ",") {
		w, ok := readWanted(entry)
		if !ok {
			return nil, fmt.Errorf("config: Devices has %q, want DEVICE, DEVICE:PORT or "+
				"DEVICE:PORT#GID as in mlx5_0:1#3: %w", entry, driver.ErrBounds)
		}
		for _, other := range all {
			if other == w {
				return nil, fmt.Errorf("config: Devices has %q twice: %w", entry, driver.ErrBounds)
			}
		}
		all = append(all, w)
	}
	return all, nil
}

func readWanted(entry string) (w wanted, ok bool) {
	w.gid = -1
	name, rest, ported := strings.Cut(entry, ":")
	port, gid, chosen := strings.Cut(rest, "#")
	w.device = name
	if name == "" || strings.ContainsAny(name, "/#. \t") {
		return w, false
	}
	if ported {
		n, err := strconv.ParseUint(port, 10, 8)
		if err != nil || n == 0 {
			return w, false
		}
		w.port = int(n)
	}
	if chosen {
		n, err := strconv.ParseUint(gid, 10, 8)
		if err != nil {
			return w, false
		}
		w.gid = int(n)
	}
	return w, true
}

// names reports whether an entry means a port.
func (w *wanted) names(d *Device, p *Port) bool {
	return w.device == d.Name && (w.port == 0 || w.port == p.Number)
}

// String is how Config.Devices spells it.
func (w wanted) String() string {
	s := w.device
	if w.port > 0 {
		s += ":" + strconv.Itoa(w.port)
	}
	if w.gid >= 0 {
		s += "#" + strconv.Itoa(w.gid)
	}
	return s
}
