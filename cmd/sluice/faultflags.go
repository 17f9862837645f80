// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/sluicehq/sluice/replay"
)

// faultsOf says which side meets which faults of --fault.
func (f *replayFlags) faultsOf() (map[replay.Side]string, error) {
	sides, ok := map[string][]replay.Side{
		"both":    {replay.PrefillSide, replay.DecodeSide},
		"prefill": {replay.PrefillSide}, "decode": {replay.DecodeSide},
	}[f.faultSide]
	if !ok {
		return nil, usagef("--fault-side %q: want both, prefill or decode", f.faultSide)
	}
	if f.faults == "" && f.faultSide != "both" {
		return nil, usagef("--fault-side %s without --fault: there is no fault to be for that side",
			f.faultSide)
	}
	if f.faults == "" {
		return nil, nil
	}
	if err := replay.CheckFaults(f.faults); err != nil {
		return nil, usagef("--fault: %w", err)
	}
	list := map[replay.Side]string{}
	for _, s := range sides {
		list[s] = f.faults
	}
	return list, nil
}
