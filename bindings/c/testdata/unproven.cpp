// SPDX-License-Identifier: Apache-2.0
// sluice.hpp: a transfer whose end is not proved is closed all the same, and says so.
#include <cstdio>

#include "sluice.hpp"

static int closes;

// These stand before those of the library.
extern "C" int sluice_abort(sluice_transfer, int64_t) { return SLUICE_ERR_UNPROVEN; }
extern "C" int sluice_transfer_close(sluice_transfer)
{
	closes++;
	return SLUICE_OK;
}

int main()
{
	int code = SLUICE_OK;
	{
		sluice::transfer dropped(7), closed(8);
		try {
			closed.close();
		} catch (const sluice::error &e) {
			code = e.code;
		}
	}
	if (code != SLUICE_ERR_UNPROVEN || closes < 2) {
		std::fprintf(stderr, "code %d, %d closed\n", code, closes);
		return 1;
	}
	std::puts("ok");
}
