package magnetar.interop.v4;

import magnetar.interop.common.ScenarioOf;

/** One thing that must work through the official client of version 4. */
interface Scenario extends ScenarioOf<Server> {
}
